"""Feelings: somebody says how he or a friend feels, and asks what to do; table in tables/feelings.toml."""

from __future__ import annotations

from random import Random
from typing import Any

from weft_training.made import cast
from weft_training.made.exchange import Exchange, Maker
from weft_training.made.wording import asked, chosen, filled, table

SAID = (
    "I feel {name}.|I feel {name} today.|I am {name}.|I am {name} today.|I'm {name}.|I am a bit {name}.|I'm so {name}.|"
    "I am feeling {name}.|I'm feeling a little {name} today.|Today I feel {name}.|I am very {name} right now.|"
    "I have been {name} all day.|I feel so {name}.|I think I am {name}."
)
DO = (
    "What can I do?|What should I do?|What can I do now?|What can I do about it?|What helps?|Do you have any advice?|"
    "What would you do?|Can you help me?|Can you give me a tip?|Any ideas?"
)
DO_AT_ONCE = (
    "I feel {name}. What can I do?|I am {name}. What should I do?|What can I do when I am {name}?|"
    "What helps when you are {name}?|What should I do if I feel {name}?|Can you help me? I am {name}.|"
    "I'm {name}, do you have any advice?|Give me a tip: what can I do when I feel {name}?"
)
WHY = (
    "Why do I feel this way?|Why do I feel like this?|Why am I {name}?|Why is that?|Where does it come from?|"
    "Why do people feel {name}?"
)
NORMAL = "Is it normal to feel {name}?|Is that normal?|Is it okay to be {name}?|Does everybody feel {name} sometimes?"
NORMAL_ANSWERS = (
    "Yes, it is normal. Everybody feels {name} sometimes.|Yes, everybody feels {name} from time to time. It is okay.|"
    "It is quite normal to be {name} now and then."
)
THANKS = "Thank you.|Thanks!|Thank you, that helps.|Thanks, I will try that.|That was kind, thank you.|Okay, thanks."
WELCOME = (
    "You are welcome! I hope that you feel better soon.|You are welcome. Take care of yourself!|"
    "I am glad to help. Be kind to yourself today.|Gladly! I am here if you want to talk."
)
WELCOME_GOOD = "You are welcome! Enjoy it.|You are welcome. Have a wonderful day!|Gladly! I am happy for you."
FRIEND = (
    "{who} is {name}. What can I do?|{who} feels {name}. How can I help?|{who} is {name} today.|"
    "What can I do if {who} is {name}?|How can I help when {who} is {name}?|{who} is very {name}. What should I do?"
)
TALK = (
    "Do you feel {name} sometimes?|Are you {name}?|Can you feel {name}?|Do you know how it is to be {name}?|"
    "Are you ever {name}?"
)
TALK_ANSWERS = (
    "No, I am a computer program, so I cannot be {name}. But I can listen to you.|"
    "I do not have feelings, so I am never {name}. How about you?|"
    "I have no feelings, but we can talk about {noun}. Are you {name}?"
)


def _entry(random: Random) -> dict[str, Any]:
    entry: dict[str, Any] = random.choice(table("feelings")["feeling"])
    return entry


def feeling(random: Random) -> list[Exchange]:
    """A feeling, what can be done, where it comes from, thanks."""
    entry = _entry(random)
    if random.random() < 0.3:
        exchanges = [(DO_AT_ONCE, entry["do"])]
        more = [(WHY, entry["why"]), (NORMAL, NORMAL_ANSWERS)]
    else:
        exchanges = [(SAID, entry["reply"])]
        more = [(DO, entry["do"]), (DO, entry["do"]), (WHY, entry["why"]), (NORMAL, NORMAL_ANSWERS)]
    random.shuffle(more)
    for each in more[: random.choice([0, 1, 1, 2, 3])]:
        if each not in exchanges:
            exchanges.append(each)
    if random.random() < 0.35:
        exchanges.append((THANKS, WELCOME_GOOD if entry.get("good") else WELCOME))
    return [(asked(random, filled(random, said, entry)), filled(random, answer, entry)) for said, answer in exchanges]


def somebody(random: Random) -> list[Exchange]:
    """Somebody else has the feeling."""
    entry = _entry(random)
    if random.random() < 0.25:
        return [(asked(random, filled(random, TALK, entry)), filled(random, TALK_ANSWERS, entry))]
    name, which, _ = cast.person(random)
    who = random.choice(["my friend", "my best friend", "a friend of mine", f"my friend {name}"])
    said = filled(random, FRIEND, {**entry, "who": who})
    answer = chosen(random, entry["friend"])
    exchanges = [(asked(random, said), answer)]
    if said.endswith("today."):
        opening = (
            "Oh! Do you want to help?|I see.|It is good that you notice it." if not entry.get("good") else "How nice!"
        )
        exchanges = [(said, f"{chosen(random, opening)} {answer}")]
    if random.random() < 0.3:
        why = {"she": "Why is she {name}?", "he": "Why is he {name}?"}[which]
        exchanges.append((filled(random, f"{why}|Why do people feel {{name}}?", entry), chosen(random, entry["why"])))
    if random.random() < 0.3:
        answer = "You are welcome! You are a good friend.|Gladly! Your friend is lucky to have you."
        exchanges.append((chosen(random, THANKS), chosen(random, answer)))
    return exchanges


def several(random: Random) -> list[Exchange]:
    """What a feeling is: "Why do people feel tired?", "What is loneliness?"."""
    entry = _entry(random)
    said = "Why do people feel {name}?|Why are people {name}?|Where does {noun} come from?|Why do we feel {name}?"
    exchanges = [(asked(random, filled(random, said, entry)), chosen(random, entry["why"]))]
    if random.random() < 0.5:
        helps = "And what helps?|What can people do then?|What can I do when I feel like that?|What do you do then?"
        exchanges.append((asked(random, chosen(random, helps)), chosen(random, entry["do"])))
    return exchanges


MAKERS: dict[Maker, float] = {feeling: 2, somebody: 0.8, several: 0.3}
