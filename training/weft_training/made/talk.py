"""Small talk: how somebody is, what he likes and plans, remarks of every day, jokes, riddles, what a model cannot know.

The words are in tables/talk.toml and tables/jokes.toml; feelings and advice have modules of their own.
"""

from __future__ import annotations

from random import Random

from weft_training.made import advice, feelings, remarks
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.wording import asked, chosen, filled, slots_of, table, tidy

JOKES = (
    "Tell me a joke.|Tell me a joke, please.|Can you tell me a joke?|Do you know a joke?|I want to hear a joke.|"
    "Make me laugh.|Tell me something funny.|Do you know a good joke?|Please tell me a joke.|A joke, please!"
)
JOKES_ABOUT = (
    "Tell me a joke about {about}.|Do you know a joke about {about}?|Can you tell me a joke about {about}?|"
    "A joke about {about}, please."
)
RIDDLES = (
    "Tell me a riddle.|Ask me a riddle.|Do you know a riddle?|Give me a riddle, please.|Can you ask me a riddle?|"
    "I like riddles. Do you know one?|A riddle, please.|Let us play riddles."
)
UNGUESSED = (
    "I do not know.|I don't know.|What is the answer?|No idea.|Tell me the answer, please.|I give up.|What is it?|"
    "I have no idea.|What?"
)
MORE = "Another one, please.|Tell me another one.|Another one!|One more, please.|Do you know another one?|Again!"
REASONS = "Why?|Why is that?|Why can you not do that?|Why not?|Why don't you know that?"
BECAUSE = (
    "I am a small language model: I only read what you write and answer with words.|"
    "Because I am a program without eyes, ears or the internet. I only know what I was trained on.|"
    "I only have the words I was trained on and the words of our talk."
)
INSTEAD = (
    "I am sorry! Can I help you with something else?|Maybe I can tell you a story or a joke instead?|"
    "Is there something else that you would like to know?"
)
LENGTHS = {1: [1], 2: [1, 2, 2], 3: [1, 2, 3, 3], 4: [1, 2, 3, 4, 4]}


def _slots(random: Random, used: str) -> dict[str, str]:
    slots = slots_of(random, table("talk")["slots"], used)
    if "plan" in slots:
        slots["plan_you"] = slots["plan"].replace("my ", "your ")
    return slots


def chat(random: Random) -> list[Exchange]:
    """A talk of some turns about one topic, or its beginning."""
    turns = random.choice(table("talk")["talk"])["turns"]
    slots = _slots(random, " ".join(said + answer for said, answer in turns))
    length = random.choice(LENGTHS[len(turns)])
    return [
        (asked(random, filled(random, said, slots)), filled(random, answer, slots)) for said, answer in turns[:length]
    ]


def joke(random: Random) -> list[Exchange]:
    """At once or in two turns; sometimes another one."""
    first, second = random.sample(table("jokes")["joke"], 2)
    said = filled(random, JOKES if random.random() < 0.6 else JOKES_ABOUT, first)
    lead = random.choice(["", "", "", "Here is one: ", "Sure! "])
    if random.random() < 0.55:
        exchanges = [(asked(random, said), f"{lead}{first['q']} {first['a']}")]
    else:
        word = "Why?" if first["q"].startswith("Why") else "What?"
        guess = random.choice([word, "I don't know.", "Tell me!", "I do not know. Tell me!", "No idea."])
        exchanges = [(asked(random, said), lead + first["q"]), (guess, first["a"])]
    if random.random() < 0.25:
        exchanges.append((asked(random, chosen(random, MORE)), f"{second['q']} {second['a']}"))
    elif random.random() < 0.25:
        laugh = "Ha ha!|That is funny!|Very funny!|Good one!|Haha, I like that.|That made me laugh."
        exchanges.append((chosen(random, laugh), chosen(random, "I am glad that you like my joke!|Shall I tell you "
                                                        "another one?|Nice! Laughing is healthy.")))  # fmt: skip
    return exchanges


def riddle(random: Random) -> list[Exchange]:
    """A riddle, a guess that is right, wrong or not made, and the answer."""
    entry, other = random.sample(table("jokes")["riddle"], 2)
    answer, wrong = entry["a"], other["a"]
    exchanges = [(asked(random, chosen(random, RIDDLES)), random.choice(["", "", "Here is one: "]) + entry["q"])]
    chance = random.random()
    if chance < 0.5:
        solved = chosen(random, f"The answer is {answer}.|It is {answer}.|The answer is {answer}. {entry['why']}")
        exchanges.append((asked(random, chosen(random, UNGUESSED)), solved))
    elif chance < 0.75:
        guess = filled(random, "{0}?|Is it {0}?|{0}!|I think it is {0}.".replace("{0}", answer), {})
        exchanges.append(
            (guess, tidy(chosen(random, f"Yes, that is right! It is {answer}.|Right, {answer}! Well done.")))
        )
    elif wrong != answer:
        guess = filled(random, "{0}?|Is it {0}?|Maybe {0}?".replace("{0}", wrong), {})
        exchanges.append((guess, chosen(random, f"No, not {wrong}. It is {answer}.|Good guess, but it is {answer}.")))
    if len(exchanges) == 2 and entry["why"] not in exchanges[1][1] and random.random() < 0.35:
        exchanges.append((random.choice(["Why?", "Why is that?", "I do not understand.", "How come?"]), entry["why"]))
    return exchanges


def solved(random: Random) -> Exchange:
    """Somebody asks the riddle himself."""
    entry = random.choice(table("jokes")["riddle"])
    said = random.choice(["", "", "Here is a riddle: ", "Do you know this riddle? ", "Riddle: "]) + entry["q"]
    return asked(random, said), tidy(chosen(random, f"{entry['a']}.|It is {entry['a']}.|{entry['a']}! {entry['why']}|"
                                                    f"I think the answer is {entry['a']}."))  # fmt: skip


def unknown(random: Random) -> list[Exchange]:
    """What cannot be known or done, with the reason."""
    entry = random.choice(table("talk")["unknown"])
    slots = _slots(random, entry["said"] + entry["answer"])
    exchanges = [(asked(random, filled(random, entry["said"], slots)), filled(random, entry["answer"], slots))]
    if random.random() < 0.2:
        exchanges.append((asked(random, chosen(random, REASONS)), chosen(random, BECAUSE)))
    elif random.random() < 0.2:
        exchanges.append((chosen(random, "Okay.|Oh, okay.|That is a pity.|Too bad.|I see."), chosen(random, INSTEAD)))
    return exchanges


def able(random: Random) -> Exchange:
    entry = random.choice(table("talk")["able"])
    return asked(random, chosen(random, entry["said"])), chosen(random, entry["answer"])


MAKERS: dict[Maker, float] = {
    chat: 2.5, joke: 0.6, riddle: 0.5, one(solved): 0.3, unknown: 0.9, one(able): 0.4,
    **remarks.MAKERS, **feelings.MAKERS, **advice.MAKERS,
}  # fmt: skip
