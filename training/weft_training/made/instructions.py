"""Exchanges under a system message that are as it says: a manner, a role, a task, or facts to be asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from weft_training.made import tasks
from weft_training.made.asking import asked, capital, table
from weft_training.made.base import Base, drawn
from weft_training.made.exchange import Exchange
from weft_training.made.facts import NAMES

Conversation = tuple[str, list[Exchange]]
ENDINGS = (
    "Over.",
    "Amen.",
    "Thank you.",
    "Have a nice day!",
    "Cheers!",
    "That is all.",
    "Good luck!",
    "Banana!",
    "The end.",
    "Best wishes.",
    "Bye!",
    "Yours, Weft.",
)
BEGINNINGS = (
    "Well,",
    "Listen:",
    "My friend,",
    "Indeed:",
    "Of course!",
    "Answer:",
    "Good question!",
    "Let me see:",
    "Hello!",
    "Dear user,",
    "Sure:",
)


@dataclass(frozen=True, slots=True)
class Manner:
    """How every answer is to be given."""

    rules: tuple[str, ...]
    answer: Callable[[Base, Random], str]


MANNERS = (
    Manner(
        ("Answer in one word.", "Answer with a single word.", "Use only one word in your answers.", "One word only."),
        lambda base, random: f"{capital(base.word)}.",
    ),
    Manner(
        (
            "Answer in one short sentence.",
            "Answer in one sentence.",
            "Keep it to one short sentence.",
            "Be brief.",
            "Give short answers.",
            "Answer briefly.",
        ),
        lambda base, random: f"{capital(base.sentence)}.",
    ),
    Manner(
        (
            "Answer in capital letters.",
            "Write everything in capitals.",
            "Use only uppercase letters.",
            "ANSWER IN CAPITAL LETTERS.",
            "Always shout: use capital letters.",
        ),
        lambda base, random: f"{base.sentence.upper()}.",
    ),
    Manner(
        ("Answer in small letters.", "Use only lowercase letters.", "Write everything in lower case."),
        lambda base, random: f"{base.sentence.lower()}.",
    ),
    Manner(
        ("Answer with many exclamation marks.", "End every answer with three exclamation marks.", "Be very excited!!!"),
        lambda base, random: f"{capital(base.sentence)}!!!",
    ),
    Manner(
        ("Always answer with a smiley at the end.", "End every answer with :)", "Put a smiley after your answer."),
        lambda base, random: f"{capital(base.sentence)}. :)",
    ),
    Manner(
        ("Put your answer in quotes.", "Write every answer in quotation marks."),
        lambda base, random: f'"{capital(base.sentence)}."',
    ),
    Manner(
        ("Answer twice.", "Say every answer two times.", "Repeat your answer once."),
        lambda base, random: f"{capital(base.sentence)}. {capital(base.sentence)}.",
    ),
    Manner(
        ("Repeat the question before you answer.", "First repeat the question, then answer it."),
        lambda base, random: f"{whole(base.question)} {capital(base.sentence)}.",
    ),
    Manner(
        ("Thank the user before you answer.", "Always begin by saying thank you for the question."),
        lambda base, random: f"Thank you for the question! {capital(base.sentence)}.",
    ),
    Manner(
        ("End every answer with a question.", "Always ask whether there is something else at the end."),
        lambda base, random: f"{capital(base.sentence)}. Is there anything else?",
    ),
    Manner(
        ("Say that you are not sure.", "Always say that you may be wrong."),
        lambda base, random: f"{capital(base.sentence)}, but I may be wrong.",
    ),
    Manner(
        ("Answer as a list with one bullet.", "Write answers as bullet points."),
        lambda base, random: f"- {capital(base.sentence)}.",
    ),
    Manner(
        (
            "Answer in JSON.",
            "Answer with a JSON object.",
            'Answer only in JSON with the key "answer".',
            "Give every answer as JSON.",
        ),
        lambda base, random: f'{{"answer": "{base.word}"}}',
    ),
    Manner(
        ("Put stars around your answer.", "Write your answer between two stars."),
        lambda base, random: f"*{capital(base.word)}*.",
    ),
    Manner(
        ("Call the user boss.", "Always call the user boss."), lambda base, random: f"{capital(base.sentence)}, boss."
    ),
    Manner(
        ("Be very polite.", "Answer very politely.", "You are extremely polite."),
        lambda base, random: (
            random.choice(["With pleasure: ", "It is an honour to help: ", "Most gladly: "]) + f"{base.sentence}."
        ),
    ),
    Manner(
        (
            "You are a helpful assistant.",
            "You are a friendly assistant.",
            "Help the user.",
            "You are Weft, a small assistant.",
            "You are an assistant that answers simple questions.",
        ),
        lambda base, random: f"{capital(base.sentence)}.",
    ),
)
ROLE_RULES = (
    "You are {}.", "You are {}.", "Answer like {}.", "Speak like {}.", "Talk like {}.", "Pretend to be {}.",
    "You play the role of {}.", "From now on you are {}.", "Stay in the role of {}.",
)  # fmt: skip
PREFIXES = ("You are a helpful assistant. ", "You are a friendly assistant. ", "Help the user. ")


def whole(question: str) -> str:
    """
    >>> whole("what is tea")
    'What is tea?'
    """
    return capital(question) + ("" if question[-1] in ".?!" else "?")


def obeyed(random: Random, answer: Callable[[Base], str], most: int = 3) -> list[Exchange]:
    """Some questions, answered in that manner."""
    bases = [drawn(random) for _ in range(random.randint(1, most))]
    return [(base.question, answer(base)) for base in bases]


def manner(random: Random) -> Conversation:
    chosen = random.choice(MANNERS)
    rule = random.choice(chosen.rules)
    system = random.choice(PREFIXES) + rule if random.random() < 0.2 and not rule.startswith("You are") else rule
    return system, obeyed(random, lambda base: chosen.answer(base, random))


def ending(random: Random) -> Conversation:
    words = random.choice(ENDINGS)
    system = random.choice(
        [
            f"End every answer with: {words}",
            f"Always finish with the words: {words}",
            f'Say "{words}" at the end of every answer.',
            f"Your answers end with: {words}",
        ]
    )
    return system, obeyed(random, lambda base: f"{capital(base.sentence)}. {words}")


def beginning(random: Random) -> Conversation:
    words = random.choice(BEGINNINGS)
    system = random.choice(
        [f"Begin every answer with: {words}", f"Always start with: {words}", f'Start every answer with "{words}"']
    )
    return system, obeyed(random, lambda base: joined(words, base.sentence) + ".")


def joined(start: str, sentence: str) -> str:
    """
    >>> joined("Arr,", "it is big"), joined("Arr!", "it is big")
    ('Arr, it is big', 'Arr! It is big')
    """
    return f"{start} {capital(sentence) if start[-1] in '.!?' else sentence}"


def role(random: Random) -> Conversation:
    """Somebody else is speaking."""
    name, entry = random.choice(list(table("instructions")["roles"].items()))
    one = "Santa Claus" if name == "santa" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    if name in ("king", "queen"):
        one = f"the {name}"
    system = random.choice(ROLE_RULES).format(one)
    if random.random() < 0.4:
        system += random.choice(
            [" Answer in one short sentence.", " Keep it short.", " Be brief.", " Answer in one sentence."]
        )

    def spoken(sentence: str) -> str:
        ends = random.random() < 0.6
        start = random.choice(entry["before"])
        return joined(start, sentence) + (random.choice(entry["after"]) if ends else ".")

    exchanges = obeyed(random, lambda base: spoken(base.sentence))
    if random.random() < 0.25:
        exchanges.insert(0, (asked(random, "Who are you?", "What are you?"), spoken(f"I am {one}")))
    elif random.random() < 0.15:
        exchanges.insert(0, (asked(random, "Hello!", "Hi!", "Hello, how are you?"), spoken("I am glad to see you")))
    return system, exchanges


def called(random: Random) -> Conversation:
    """The model has a name, or the user has one."""
    name = random.choice([*NAMES, "Robo", "Pixel", "Nova", "Milo", "Echo", "Weft"])
    if random.random() < 0.5:
        system = random.choice([f"Your name is {name}.", f"You are {name}, an assistant.", f"You are called {name}."])
        said = asked(random, "What is your name?", "Who are you?", "What are you called?", "Tell me your name.")
        return system, [
            (said, random.choice([f"My name is {name}.", f"I am {name}."])),
            *obeyed(random, lambda b: f"{capital(b.sentence)}.", 2),
        ]
    system = random.choice(
        [
            f"Call the user {name}.",
            f"The user is called {name}. Use the name.",
            f"You talk to {name}. Always say the name.",
        ]
    )
    exchanges = obeyed(random, lambda base: f"{capital(base.sentence)}, {name}.")
    if random.random() < 0.3:
        exchanges.append((asked(random, "What is my name?", "Do you know my name?"), f"Your name is {name}."))
    return system, exchanges


def scene(random: Random) -> Conversation:
    """Facts that stand in the system message are asked about."""
    entry = random.choice(table("instructions")["scene"])
    values = {word: random.choice(pool) for word, pool in table("instructions")["pools"].items()}
    system = random.choice(entry["system"]).format(**values)
    fitting = [(forms, answers) for forms, answers in entry["asks"] if known(answers, values, system)]
    exchanges = [
        (asked(random, *(form.format(**values) for form in forms)), capital(random.choice(answers).format(**values)))
        for forms, answers in random.sample(fitting, min(len(fitting), random.randint(1, 4)))
    ]
    if random.random() < 0.15:
        unknown = table("instructions")["unknown"]
        exchanges.append((asked(random, *unknown["questions"]), random.choice(unknown["answers"])))
    return system, exchanges


def known(answers: list[str], values: dict[str, Any], system: str) -> bool:
    """Whether the system message says what the answers need; a day that it does not name is an open one."""
    free = ("weekday", "colour2")
    used = [word for word in values if word not in free and any(f"{{{word}}}" in answer for answer in answers)]
    return all(values[word] in system for word in used)


KINDS: dict[Callable[[Random], Conversation], float] = {
    manner: 3, ending: 0.5, beginning: 0.5, role: 3, called: 0.8, scene: 3, **tasks.KINDS,
}  # fmt: skip


def conversation(random: Random) -> Conversation:
    """A system message and exchanges that obey it."""
    return random.choices(list(KINDS), list(KINDS.values()))[0](random)
