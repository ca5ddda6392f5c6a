"""Stories of a hero with a wish, a helper, two attempts and an end that follows; questions about them.

The plots are in tables/stories.toml, who appears in them in tables/cast.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from weft_training.made import cast, continuations, poems
from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import asked, chosen, filled, slots_of, table, tidy

KINDS = {"child": 5, "animal": 6, "role": 3, "thing": 2, "sea": 1.2, "sky": 0.8}
OPENINGS = (
    "Once upon a time there was {a_hero} who lived {place}.|Once upon a time {a_hero} lived {place}.|"
    "Long ago, {a_hero} lived {place}.|There once was {a_hero} who lived {place}.|{a_hero} lived {place}."
)
STANDING = (
    "Once upon a time there was {a_hero} {place}.|There once was {a_hero} {place}.|Long ago there was {a_hero} {place}."
)
ASKED = (
    "Tell me a {sort}story {about}.|Tell me a {sort}story {about}, please.|Can you tell me a {sort}story {about}?|"
    "Please tell me a {sort}story {about}.|Write a {sort}story {about}.|I would like to hear a {sort}story {about}.|"
    "Could you write a {sort}story {about}?|Do you know a {sort}story {about}?|Make up a {sort}story {about}.|"
    "Please write me a {sort}story {about}."
)
SORTS = ["", "", "", "short ", "short ", "little ", "bedtime ", "nice ", "funny "]
NIGHTS = (
    "That night {hero} slept deeply and had a sweet dream. Good night!|Then the moon came up, and {hero} fell asleep.|"
    "In the evening {hero} was tired and happy and fell asleep at once. Sleep well!"
)
PARTS = ("problem", "first", "second", "end")
# Who helped whom: a question and its answer.
HELPED = {
    "helper": [("Who helped {hero}?|Who helped?|Who was the helper?|Who came to help?",
                "{helper} helped {hero}.|It was {helper} who helped {hero}.")],
    "hero": [("Who helped?|Whom did {hero} help?|Who helped {the_helper}?|Who was helped?",
              "{hero} helped {the_helper}.|It was {hero} who helped {the_helper}.")],
    "nobody": [],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tale:
    """A story whose words are all chosen; `parts` are its sentences in order, the opening first."""

    slots: dict[str, str]
    plot: dict[str, Any]
    parts: dict[str, str]

    def told(self, *names: str) -> str:
        return " ".join(self.parts[name] for name in names or tuple(self.parts))

    def short(self) -> str:
        """Without the first attempt, where the rest can be understood without it."""
        return self.told(*(name for name in self.parts if name != "first" or self.plot.get("whole")))

    def sentence(self) -> str:
        """All of it in one sentence."""
        who = {"hero": "and {he} helped {the_helper}", "nobody": self.plot.get("short")}
        rest = who.get(self.plot.get("helps"), "and {the_helper} helped")
        return f"{{Hero}} {self.plot['wish']}, {rest}.".format_map(self.slots)


def tale(random: Random, kind: str | None = None, tone: str | None = None) -> Tale:
    """A story about a hero of this kind, or of any."""
    plots = table("stories")["plot"]
    if tone == "funny":
        kind = random.choice(["child", "animal", "role"])
    kind = kind or random.choices(list(KINDS), list(KINDS.values()))[0]
    fitting = [each for each in plots if kind in each["kinds"] and (tone is None or each.get("tone") == tone)]
    plot = random.choice(fitting)
    heroes = iter(lambda: cast.hero(random, kind), None)
    hero = next(each for each in heroes if each["hero_word"] not in plot.get("unless", ()))
    slots = hero | cast.helper(random, kind, hero)
    slots |= slots_of(random, plot.get("slots", {}), " ".join(plot[part] for part in (*PARTS, "wish", "about")))
    opening = STANDING if kind in ("thing", "sky") else OPENINGS
    parts = {"opening": filled(random, opening, slots)}
    return Tale(slots, plot, parts | {part: filled(random, plot[part], slots) for part in PARTS})


def request(random: Random, told: Tale, sort: str) -> str:
    """What somebody says who wants this story: about its hero, its helper, its place, its topic, or about nothing."""
    slots = told.slots
    topic, other = chosen(random, slots["topics"]), slots["helper_topic"]
    ways = [f"about {topic}"] * 6 + [f"about {topic} {slots['place']}"] * 2
    ways += [f"about {topic} and {other}"] * 3 if other else []
    ways += ["", "", f"about {told.plot['about'].format_map(slots)}"]
    ways += [f"about {topic} and {told.plot['about'].format_map(slots)}"]
    text = chosen(random, ASKED).replace("{sort}", sort).replace("{about}", random.choice(ways))
    return asked(random, tidy(" ".join(text.split()).replace(" .", ".").replace(" ?", "?").replace(" ,", ",")))


def story(random: Random) -> list[Exchange]:
    """A story, and sometimes one to three questions about it."""
    sort = random.choice(SORTS)
    told = tale(random, tone="funny" if sort == "funny " else None)
    text = told.short() if sort == "short " else told.told()
    if sort == "bedtime ":
        text += " " + filled(random, NIGHTS, told.slots)
    exchanges = [(request(random, told, sort), text)]
    if random.random() < 0.55:
        exchanges += questions(random, told)[: random.choice([1, 1, 2, 3])]
    if random.random() < 0.06:
        another = chosen(random, "Tell me another one.|Another story, please.|Can you tell me another story?|One more!")
        exchanges.append((another, tale(random).told()))
    return exchanges


def questions(random: Random, told: Tale) -> list[Exchange]:
    """Everything that can be asked about a story, in any order, with the answers out of it."""
    slots = told.slots
    end = told.parts["end"]
    wish = f"{slots['Hero']} {told.plot['wish'].format_map(slots)}."
    found = [
        ("What happened then?|What happened next?|And then?|Go on, please.|What happens after that?|Then what?",
         filled(random, told.plot["then"], slots)),
        *((said, filled(random, answer, slots)) for said, answer in HELPED[told.plot.get("helps", "helper")]),
        ("Where did {hero} live?|Where was {hero}?|Where does the story happen?",
         filled(random, "{hero} lived {place}.|The story happens {place}.", slots)),
        ("How does it end?|How does the story end?|What happens in the end?|How did it end?", end),
        ("What is the lesson?|What is the moral of the story?|What can I learn from it?|What does the story teach?",
         chosen(random, "The lesson is: {0}|{0}|The story teaches this: {0}").replace("{0}", told.plot["lesson"])),
        ("What did {hero} want?|What was the problem?|What is the story about?|What was {his} wish?",
         filled(random, f"{wish}|The story is about {slots['hero']}. {wish}", slots)),
        ("Who is the story about?|Who is the hero of the story?|Who was the story about?",
         filled(random, "The story is about {a_hero}.|It is about {a_hero} who lived {place}.", slots)),
        ("Can you say that in one sentence?|Make it shorter, please.|Can you tell it in one sentence?",
         told.sentence()),
        ("I like this story.|That was a nice story!|Thank you, that was nice.|What a lovely story!",
         filled(random, "I am glad that you like the story about {hero}.|Thank you! {hero} is happy, too.|"
                "Thanks! Shall I tell you another story?", slots)),
    ]  # fmt: skip
    random.shuffle(found)
    return [(asked(random, filled(random, said, slots)), answer) for said, answer in found]


def retold(random: Random) -> list[Exchange]:
    """The first sentences of a story are given, the others are asked for."""
    told = tale(random)
    given = random.choice([1, 1, 2, 2, 2])
    parts = list(told.parts)
    begin = told.told(*parts[:given])
    rest = told.told(*(part for part in parts[given:] if part != "first" or given == 2 or told.plot.get("whole")))
    exchanges = [(continuations.prompt(random, begin), rest)]
    if random.random() < 0.25:
        exchanges += questions(random, told)[:1]
    return exchanges


MAKERS: dict[Maker, float] = {story: 5, retold: 1.2, **continuations.MAKERS, **poems.MAKERS}
