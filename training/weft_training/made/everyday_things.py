"""Questions about everyday things and what may follow an answer: frames for things.toml and measures.toml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from weft_training.made.everyday_words import NUMBERS, article, capital, leading, listed, plural, small, spoken, table
from weft_training.made.exchange import Exchange

GROUPS = {
    "pet": "pets", "farm_animal": "farm animals", "wild_animal": "wild animals", "bird": "birds", "insect": "insects",
    "small_animal": "small animals", "sea_animal": "sea animals", "fruit": "fruits", "vegetable": "vegetables",
    "food": "foods", "drink": "drinks", "weather": "things in the weather", "plant": "things that grow",
    "landform": "places in nature", "place": "places", "room": "rooms of a house", "furniture": "pieces of furniture",
    "kitchen": "things in the kitchen", "household": "things in the home", "tool": "tools", "job": "jobs",
    "vehicle": "vehicles", "body": "parts of the body", "clothing": "pieces of clothing",
    "instrument": "musical instruments",
    "material": "materials", "school": "things for school", "sport": "sports", "space": "things in space",
    "device": "devices", "event": "events", "people": "people around us",
}  # fmt: skip
NOWHERE = ("event", "sport", "people")  # what nobody looks for in a place
MADE = (
    "furniture",
    "kitchen",
    "household",
    "tool",
    "material",
    "vehicle",
    "clothing",
    "instrument",
    "device",
    "school",
)
PERSONS = ("job", "people")  # who is not called "it"
ANIMALS = ("pet", "farm_animal", "wild_animal", "bird", "insect", "small_animal", "sea_animal")
KIN = (
    ANIMALS,
    ("fruit", "vegetable", "food", "drink"),
    ("furniture", "household", "kitchen", "tool", "device"),
)


@dataclass(frozen=True)
class Thing:
    """An entry of things.toml."""

    name: str
    group: str
    kind: str
    looks: str
    where: str
    facts: list[str]
    use: str = ""
    good: str = ""
    form: str = "a"
    living: str = ""

    @property
    def named(self) -> str:
        return {"a": article(self.name), "the": f"the {self.name}"}.get(self.form, self.name)

    @property
    def many(self) -> str:
        return plural(self.name) if self.form == "a" else self.named

    @property
    def be(self) -> str:
        return "are" if self.form == "plural" else "is"

    @property
    def do(self) -> str:
        return "do" if self.form == "plural" else "does"

    @property
    def it(self) -> str:
        if self.group in PERSONS:
            return self.named
        return "they" if self.form == "plural" else "it"

    @property
    def them(self) -> str:
        return "them" if self.form == "plural" else self.it

    @property
    def subject(self) -> str:
        return capital(self.named)

    @property
    def defined(self) -> str:
        return f"{self.subject} {self.be} {self.kind}."

    @property
    def useful(self) -> str:
        """Why it is useful, to stand after "because"."""
        return self.good or f"you can use {self.them} to {self.use}"

    def alone(self, fact: str) -> str:
        """A fact as the first sentence of an answer: the thing is named in it or before it."""
        told = leading(self.named, fact)
        named = self.name.lower() in told.lower() or self.many.lower() in told.lower()
        return told if named else f"{self.defined} {fact}"


@cache
def things() -> list[Thing]:
    groups = table("things").items()
    return [Thing(name=name, group=group, **entry) for group, named in groups for name, entry in named.items()]


@cache
def grouped(group: str) -> list[Thing]:
    return [thing for thing in things() if thing.group == group]


def neighbour(random: Random, thing: Thing, widely: float = 0.0) -> Thing:
    """Another one of its group, or sometimes of a group that is akin."""
    kin = next((groups for groups in KIN if thing.group in groups), (thing.group,))
    groups = kin if random.random() < widely else (thing.group,)
    return random.choice([other for other in things() if other.group in groups and other != thing])


def define(random: Random, thing: Thing) -> str:
    fact = random.choice(thing.facts)
    return random.choice([thing.defined, thing.defined, f"{thing.defined} {fact}", f"{thing.defined} {fact}",
                          f"{thing.defined} {capital(thing.it)} {thing.looks}."])  # fmt: skip


def briefly(random: Random, thing: Thing) -> str:
    return thing.defined


def look(random: Random, thing: Thing) -> str:
    return f"{thing.subject} {thing.looks}."


def locate(random: Random, thing: Thing) -> str:
    if thing.group == "body":
        return f"{thing.subject} is {thing.where}."
    return random.choice([f"You can find {thing.named} {thing.where}.", f"{thing.subject} can be found {thing.where}.",
                          f"You find {thing.named} {thing.where}."])  # fmt: skip


def serve(random: Random, thing: Thing) -> str:
    """What it is for, or what it is good for."""
    if thing.use:
        return random.choice(
            [
                f"You use {thing.named} to {thing.use}.",
                f"{thing.subject} {thing.be} used to {thing.use}.",
                f"With {thing.named} you can {thing.use}.",
                f"People use {thing.named} to {thing.use}.",
            ]
        )
    return random.choice([f"{thing.subject} {thing.be} useful because {thing.good}.",
                          f"{thing.subject} {thing.be} important because {thing.good}."])  # fmt: skip


def tell(random: Random, thing: Thing) -> str:
    first, second = random.sample(thing.facts, 2)
    return random.choice([f"{thing.defined} {first} {second}", f"{thing.defined} {first}",
                          f"{thing.defined} {capital(thing.it)} {thing.looks}. {first}",
                          f"{thing.alone(first)} {second}"])  # fmt: skip


def simply(random: Random, thing: Thing) -> str:
    fact = random.choice(thing.facts)
    simple = f"{thing.named} {thing.be} {thing.kind}."
    return random.choice([f"{capital(simple)} {capital(thing.it)} {thing.looks}. {fact}",
                          f"Sure! {capital(simple)} {fact}",
                          f"In simple words, {simple} {fact}", f"{capital(simple)} {fact}"])  # fmt: skip


def fun(random: Random, thing: Thing) -> str:
    fact = thing.alone(random.choice(thing.facts))
    return random.choice([fact, f"Here is one: {fact}", f"Did you know this? {fact}", f"Sure! {fact}"])


Ask = Callable[[Random, Thing], str]
# A way to answer, and the questions for it: {a} the thing, {s} in the plural, {be} and {do} agree.
QUESTIONS: list[tuple[Ask, float, list[str]]] = [
    (define, 3, ["What {be} {a}?", "What {be} {a}?", "What {be} {a}?", "What exactly {be} {a}?",
                 "Can you tell me what {a} {be}?",
                 "Do you know what {a} {be}?", "Tell me what {a} {be}.", "What does the word {n} mean?",
                 "What is meant by {n}?", "Define {n}."]),
    (tell, 3, ["Tell me about {s}.", "Tell me about {a}.", "What do you know about {s}?",
               "What can you tell me about {s}?",
               "Tell me something about {a}.", "Tell me something about {s}.", "Give me some facts about {s}.",
               "Talk to me about {s}.", "I want to know more about {s}.", "Do you know anything about {s}?"]),
    (simply, 1, ["Explain {a} to a child.", "Explain {a} in simple words.", "Explain to a child what {a} {be}.",
                 "How would you explain {a} to a child?", "Explain {a} to a five year old.", "Explain what {a} {be}."]),
    (briefly, 0.5, ["Explain {a} in one sentence.", "Tell me in one sentence what {a} {be}.",
                    "In one sentence, what {be} {a}?", "Say in one sentence what {a} {be}."]),
    (look, 1, ["What {do} {a} look like?", "Describe {a}.", "How {do} {a} look?", "Describe how {a} look{v}.",
               "Tell me what {a} look{v} like.", "Can you describe {a}?"]),
    (locate, 1, ["Where can I find {a}?", "Where {be} {a} found?", "Where do you find {s}?", "Where can {a} be found?",
                 "Where can I see {a}?", "Where would I look for {a}?"]),
    (fun, 1, ["Tell me a fun fact about {s}.", "Give me a fact about {s}.", "Tell me one thing about {s}.",
              "Do you know a fun fact about {s}?", "What is interesting about {s}?",
              "Give me an interesting fact about {a}.",
              "Say something interesting about {s}."]),
]  # fmt: skip
USES = ["What {be} {a} for?", "What {be} {a} used for?", "What can I do with {a}?", "What do people use {a} for?",
        "Why do people use {a}?", "What is the use of {a}?", "What do I need {a} for?",
        "When do I need {a}?"]  # fmt: skip
VALUES = ["Why {be} {a} important?", "Why {be} {a} useful?", "What {be} {a} good for?", "Why do we need {s}?",
          "Why {be} {a} good for us?", "How {be} {a} useful to people?"]  # fmt: skip


def fill(frame: str, thing: Thing) -> str:
    verb = "" if thing.form == "plural" else "s"
    return frame.format(a=thing.named, s=thing.many, n=thing.name, be=thing.be, do=thing.do, v=verb)


def asking(random: Random, thing: Thing) -> tuple[Ask, str]:
    """A way to answer and a frame of a question for it, which fit the thing."""
    served = (serve, 2.0, USES if thing.use else VALUES)
    chosen = [*(each for each in QUESTIONS if each[0] is not locate or thing.group not in NOWHERE), served]
    answer, _, frames = random.choices(chosen, [weight for _, weight, _ in chosen])[0]
    return answer, random.choice(frames)


def unsaid(random: Random, thing: Thing, said: str) -> str:
    """A fact that was not said yet."""
    left = [fact for fact in thing.facts if fact not in said and thing.alone(fact) not in said]
    return random.choice(left or thing.facts)


def after(random: Random, thing: Thing, said: str) -> Exchange:
    """What may follow an answer about a thing."""
    more = unsaid(random, thing, said)
    named = more if thing.defined in thing.alone(more) else thing.alone(more)
    frames: list[tuple[list[str], str]] = [
        (["Tell me more.", "Can you tell me more?", "More, please.", "What else?", "Go on.", "Anything else?",
          "What else do you know about {them}?", "Tell me more about {them}."],
         random.choice([more, named, f"Sure. {more}", f"Of course. {named}"])),
        (["Can you say that in one sentence?", "In one sentence, please.", "Say it in one sentence.",
          "Can you make it shorter?",
        "Shorter, please."], random.choice([thing.defined, f"In short: {thing.defined}"])),
        (["Why {be} {it} important?", "Why {be} {it} useful?", "Why do we need {them}?"],
         random.choice([f"{capital(thing.it)} {thing.be} useful because {thing.useful}.", f"Because {thing.useful}."])),
        (["Why?", "Why is that?"], f"If you ask why {thing.named} {thing.be} important: because {thing.useful}."),
        (["What {do} {it} look like?", "Can you describe {them}?", "How {do} {it} look?"],
         random.choice([f"{capital(thing.it)} {thing.looks}.", look(random, thing)])),
        (["Where can I find {them}?", "Where {be} {it} found?"],
         locate(random, thing)),
    ]  # fmt: skip
    weights = [4, 2 * (thing.defined in said), 1, 0.5, 1, int(thing.group not in NOWHERE)]
    asked, answer = random.choices(frames, weights)[0]
    said = random.choice(asked).format(it=thing.it, them=thing.them, be=thing.be, do=thing.do)
    return small(said) if random.random() < 0.15 else said, answer


def thing_asked(random: Random) -> list[Exchange]:
    """A question about a thing; sometimes more of it, or the same about its neighbour."""
    thing = random.choice(things())
    answer, frame = asking(random, thing)
    told = answer(random, thing)
    if "important" in frame:
        told = told.replace(f"{thing.be} useful because", f"{thing.be} important because")
    exchanges = [(spoken(random, fill(frame, thing)), told)]
    while random.random() < 0.35 and len(exchanges) < 4:
        said = " ".join(said for _, said in exchanges)
        further = after(random, thing, said)
        exchanges += [further] if further[1] not in said else []
    other = neighbour(random, thing)
    if random.random() < 0.12 and answer is not serve:
        named = random.choice([other.named, other.named, other.many])
        asked = random.choice(["And {}?", "And what about {}?", "What about {}?", "How about {}?", "and {}?"])
        exchanges = [exchanges[0], (asked.format(named), answer(random, other))]
    return exchanges


def valued(random: Random) -> list[Exchange]:
    """Is it useful? Yes. Why?"""
    thing = random.choice(things())
    word = random.choice(["important", "useful", "useful"])
    asked = spoken(random, f"{capital(thing.be)} {thing.named} {word}?")
    yes = f"Yes, {thing.named} {thing.be} {word}"
    if random.random() < 0.4:
        return [(asked, f"{yes} because {thing.useful}.")]
    why = random.choice(["Why?", "Why is that?", "why?", "Why do you think so?", "How so?"])
    because = random.choice([f"Because {thing.useful}.", f"{thing.subject} {thing.be} {word} because {thing.useful}."])
    return [(asked, f"{yes}."), (why, because)]


def difference(random: Random) -> list[Exchange]:
    thing = random.choice(things())
    other = neighbour(random, thing, 0.35)
    pair = f"{thing.named} and {other.named}"
    asked = random.choice(
        [
            f"What is the difference between {pair}?",
            f"How are {pair} different?",
            f"Tell me the difference between {pair}.",
            f"Compare {pair}.",
            f"What is different between {pair}?",
            f"How can I tell {thing.named} from {other.named}?",
        ]
    )
    kinds = f"{thing.subject} {thing.be} {thing.kind}, while {other.named} {other.be} {other.kind}."
    sights = f"{thing.subject} {thing.looks}, while {other.named} {other.looks}."
    first, second = random.choice([(kinds, sights), (kinds, sights), (sights, kinds)])
    exchanges = [(spoken(random, asked), first)]
    if random.random() < 0.3:
        exchanges.append((random.choice(["Tell me more.", "What else is different?", "Anything else?"]), second))
    if random.random() < 0.2 and other.group == thing.group:
        same = f"{capital(pair)} are both {GROUPS[thing.group]}."
        exchanges.append(
            (random.choice(["What do they have in common?", "What is the same?", "How are they alike?"]), same)
        )
    return exchanges


def alive(random: Random) -> Exchange:
    """Is it an animal or a plant?"""
    groups = (*ANIMALS, "fruit", "vegetable", "plant") if random.random() < 0.75 else MADE
    thing = random.choice([each for each in things() if each.group in groups])
    asked = random.choice(["{} {} an animal or a plant?", "{} {} a plant or an animal?"])
    asked = asked.format(capital(thing.be), thing.named)
    if thing.group in ANIMALS:
        return spoken(random, asked), f"{thing.subject} is an animal. It is {thing.kind}."
    if thing.living == "plant" or (thing.group in ("fruit", "vegetable", "plant") and not thing.living):
        whole = (
            "is a plant"
            if thing.group == "plant" and thing.name not in ("leaf", "seed", "flower")
            else "is part of a plant"
        )
        return spoken(random, asked), f"{thing.subject} {whole}. It is {thing.kind}."
    return spoken(random, asked), f"{thing.subject} {thing.be} neither an animal nor a plant. {thing.defined}"


def sentence(random: Random) -> Exchange:
    """A sentence with a word in it."""
    thing = random.choice(things())
    asked = random.choice(["Give me a sentence with the word {}.", "Write a sentence with the word {}.",
                           "Use the word {} in a sentence.", "Make a sentence with {}.",
                           "Can you use {} in a sentence?", "Write one sentence about {many}."])  # fmt: skip
    facts = [thing.alone(fact) for fact in thing.facts if thing.defined not in thing.alone(fact)]
    return spoken(random, asked.format(thing.name, many=thing.many)), random.choice([*facts, look(random, thing)])


def kinds(random: Random) -> list[Exchange]:
    """Name three fruits; and one more."""
    group = random.choice([group for group in GROUPS if len(grouped(group)) > 5])
    known = [thing for thing in grouped(group) if thing.form != "the" or group in ("body", "space")]
    count = random.randint(2, min(5, len(known) - 1))
    chosen = [thing.many for thing in random.sample(known, count + 1)]
    last, found = chosen.pop(), chosen
    word = random.choice([NUMBERS[count], NUMBERS[count], str(count)])
    asked = random.choice([f"Name {word} {GROUPS[group]}.", f"Tell me {word} {GROUPS[group]}.",
                           f"List {word} {GROUPS[group]}.",
                           f"Give me {word} examples of {GROUPS[group]}.", f"Can you name {word} {GROUPS[group]}?",
                           f"Give me a list of {word} {GROUPS[group]}."])  # fmt: skip
    if "ist " in asked:
        answer = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(found, 1))
    else:
        three = f"{capital(NUMBERS[count])} {GROUPS[group]} are {listed(found)}."
        answer = random.choice([f"{capital(listed(found))}.", f"{capital(listed(found))} are {GROUPS[group]}.", three])
    exchanges = [(asked, answer)]
    if random.random() < 0.25:
        exchanges.append((random.choice(["One more, please.", "Name one more.", "Another one?"]), f"{capital(last)}."))
    return exchanges


def measured(random: Random) -> Exchange:
    """Which of two is bigger, faster, ...: only where they are far apart."""
    measure = random.choice(table("measures")["measure"])
    values: dict[str, float] = measure["values"]
    pairs = [(a, b) for a in values for b in values if values[a] >= 1.6 * values[b]]
    high, low = random.choice(pairs)
    a, b = (f"the {high}", f"the {low}") if measure.get("the") else (article(high), article(low))
    if measure.get("names"):
        a, b = high, low
    more, less = measure["more"], measure["less"]
    first, second = random.choice([(a, b), (b, a)])
    word, truth = random.choice([(more, a), (less, b)])
    other = b if truth == a else a
    if random.random() < 0.6:
        asked = random.choice([f"Which is {word}, {first} or {second}?", f"What is {word}, {first} or {second}?",
                               f"Which one is {word}: {first} or {second}?"])  # fmt: skip
        return spoken(random, asked), f"{capital(truth)} is {word} than {other}."
    right = random.random() < 0.5
    asked = f"Is {truth if right else other} {word} than {other if right else truth}?"
    no = f"No, {other} is not {word} than {truth}. {capital(truth)} is {word}."
    return spoken(random, asked), f"Yes, {truth} is {word} than {other}." if right else no
