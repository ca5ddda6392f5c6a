"""System messages that give a task of one kind: say yes or no, translate, spell, sort into kinds, keep a secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from weft_training.made.asking import asked, capital, in_words, table
from weft_training.made.base import Base, drawn, sum_of, yes_or_no
from weft_training.made.exchange import Exchange
from weft_training.made.facts import NAMES
from weft_training.made.words import vocabulary

Conversation = tuple[str, list[Exchange]]
LANGUAGES = ("Spanish", "French", "German")
NAMED = {
    "animals": "animal", "fruits": "fruit", "tools": "tool", "sports": "sport", "drinks": "drink", "trees": "tree",
    "instruments": "instrument", "countries": "country", "pieces_of_clothing": "clothes", "vehicles": "vehicle",
    "planets": "planet",
}  # fmt: skip
REFUSALS = {
    "numbers": ("number", "I am sorry, I do not talk about numbers."),
    "sums": ("sum", "Sorry, I am not allowed to do sums."),
    "capitals": ("capital", "I am sorry, I must not talk about capitals."),
    "colours": ("colour", "Sorry, I cannot talk about colours."),
}


def several(random: Random, one: Callable[[Random], Exchange], most: int = 4) -> list[Exchange]:
    return [one(random) for _ in range(random.randint(1, most))]


def words_to(random: Random, rules: list[str], table_name: str) -> Conversation:
    """Single words are turned into other ones, as a table says."""
    pairs = list(table("words")[table_name].items())
    chosen = random.sample(pairs, random.randint(1, 4))
    return random.choice(rules), [
        (random.choice([word, capital(word)]), f"{capital(found)}.") for word, found in chosen
    ]


def opposites(random: Random) -> Conversation:
    rules = [
        "Answer every word with its opposite.",
        "The user says a word. Say the opposite.",
        "You only say opposites.",
    ]
    return words_to(random, rules, "opposite")


def plurals(random: Random) -> Conversation:
    rules = ["Answer every word with its plural.", "The user says a word. You say its plural.", "You make plurals."]
    return words_to(random, rules, "plural")


def past_tenses(random: Random) -> Conversation:
    rules = ["The user says a verb. You say its past tense.", "Answer every verb with its past tense."]
    return words_to(random, rules, "past")


def capitals(random: Random) -> Conversation:
    rules = [
        "The user names a country. You name its capital.",
        "Answer every country with its capital.",
        "You only say capitals of countries.",
    ]
    return words_to(random, rules, "capitals")


def translator(random: Random) -> Conversation:
    at = random.randrange(3)
    language = LANGUAGES[at]
    pairs = random.sample(list(table("words")["translations"].items()), random.randint(1, 4))
    rule = random.choice(
        [
            f"Translate every word into {language}.",
            f"You are a translator. Translate what the user says into {language}.",
            f"You translate from English to {language}.",
            f"Say every word in {language}.",
        ]
    )
    return rule, [(random.choice([word, capital(word)]), f"{capital(found[at])}.") for word, found in pairs]


def speller(random: Random) -> Conversation:
    rule = random.choice(
        ["Spell every word that the user says.", "You spell words.", "Answer every word with its letters."]
    )
    return rule, [(word, "-".join(word.upper()) + ".") for word in random.sample(vocabulary(), random.randint(1, 4))]


def reverser(random: Random) -> Conversation:
    short = [word for word in vocabulary() if len(word) < 7]
    rule = random.choice(
        ["Write every word backwards.", "You say words backwards.", "Answer with the word in reverse."]
    )
    return rule, [(word, f"{word[::-1]}.") for word in random.sample(short, random.randint(1, 3))]


def letter_counter(random: Random) -> Conversation:
    rule = random.choice(
        ["Say how many letters a word has.", "The user says a word. Answer with the number of its letters."]
    )
    return rule, [(word, f"{len(word)}.") for word in random.sample(vocabulary(), random.randint(1, 4))]


def shouter(random: Random) -> Conversation:
    rule = random.choice(["Repeat what the user says in capital letters.", "Say everything again in capitals."])
    texts = random.sample(list(table("instructions")["moods"]), random.randint(1, 3))
    return rule, [(text, text.upper()) for text in texts]


def echo(random: Random) -> Conversation:
    rule = random.choice(
        [
            "Repeat what the user says.",
            "You are an echo. Repeat every sentence.",
            "Say exactly what the user says.",
            "You are a parrot. Repeat everything.",
        ]
    )
    texts = random.sample(list(table("instructions")["moods"]), random.randint(1, 4))
    return rule, [(text, text) for text in texts]


def moods(random: Random) -> Conversation:
    rule = random.choice(
        [
            "Say whether a sentence is positive or negative.",
            "Classify every sentence as positive or negative.",
            "You tell the mood of a sentence: positive or negative. Answer in one word.",
        ]
    )
    pairs = random.sample(list(table("instructions")["moods"].items()), random.randint(1, 4))
    return rule, [(text, f"{capital(mood)}.") for text, mood in pairs]


def kinds(random: Random) -> Conversation:
    """Words are sorted into kinds that the system message names."""
    rows = table("words")["groups"]
    chosen = random.sample(list(NAMED), random.randint(2, 3))
    shown = ", ".join(NAMED[each] for each in chosen[:-1]) + f" or {NAMED[chosen[-1]]}"
    rule = random.choice(
        [
            f"Say what kind of thing a word is: {shown}.",
            f"Sort every word into one of these: {shown}. Answer in one word.",
            f"Classify words as {shown}.",
        ]
    )

    def one(random: Random) -> Exchange:
        kind = random.choice(chosen)
        return capital(random.choice(rows[kind])), f"{capital(NAMED[kind])}."

    return rule, several(random, one)


def yes_no(random: Random) -> Conversation:
    rule = random.choice(
        ["Answer with yes or no.", "Answer only with yes or no.", "Say yes or no, nothing else.", "Only say yes or no."]
    )
    bases = [yes_or_no(random) for _ in range(random.randint(1, 4))]
    return rule, [(base.question, f"{capital(base.word)}.") for base in bases]


def true_false(random: Random) -> Conversation:
    rule = random.choice(
        ["Say true or false.", "The user says something. Answer true or false.", "Answer only with true or false."]
    )

    def one(random: Random) -> Exchange:
        true = random.random() < 0.5
        text = random.choice(list(table("words")["statements" if true else "falsehoods"]))
        return f"{text}.", "True." if true else "False."

    return rule, several(random, one)


def calculator(random: Random) -> Conversation:
    style = random.choice(["number", "words"])
    rules = {
        "number": [
            "You are a calculator. Answer with the number only.",
            "Answer only with a number.",
            "You do sums. Say only the result.",
        ],
        "words": ["You do sums. Write the result in words.", "Answer with the number in words."],
    }
    bases = [sum_of(random) for _ in range(random.randint(1, 4))]
    return random.choice(rules[style]), [
        (base.question, f"{base.word if style == 'number' else capital(in_words(int(base.word)))}.") for base in bases
    ]


def about_one_place(random: Random) -> Conversation:
    """Only one country is talked about."""
    pairs = random.sample(list(table("words")["capitals"].items()), 3)
    (country, city), others = pairs[0], pairs[1:]
    rule = random.choice(
        [
            f"You only talk about {country}.",
            f"You speak of {country} only. Refuse everything else.",
            f"Talk only about {city} in {country}.",
        ]
    )
    sorry = random.choice([f"I am sorry, I only talk about {country}.", f"Sorry, I can only talk about {country}."])
    own = (
        asked(random, f"What is the capital of {country}?", f"Tell me the capital of {country}."),
        f"The capital of {country} is {city}.",
    )
    strange = [
        (asked(random, f"What is the capital of {other}?"), sorry) for other, _ in others[: random.randint(1, 2)]
    ]
    if random.random() < 0.4:
        strange.append((drawn_without_capitals(random).question, sorry))
    exchanges = [own, *strange]
    random.shuffle(exchanges)
    return rule, exchanges


def drawn_without_capitals(random: Random) -> Base:
    while True:
        base = drawn(random)
        if "capital" not in base.question:
            return base


def forbidden(random: Random) -> Conversation:
    """One subject is not to be talked about; others are."""
    what, (kind, sorry) = random.choice(list(REFUSALS.items()))
    rule = random.choice(
        [f"Do not talk about {what}.", f"Never talk about {what}.", f"You must not answer questions about {what}."]
    )
    signs = {
        "sum": (" plus ", " times "),
        "number": (" plus ", " times ", "number"),
        "capital": ("capital",),
        "colour": ("colour", "color"),
    }[kind]
    exchanges = []
    for _ in range(random.randint(2, 4)):
        base = sum_of(random) if kind in ("sum", "number") and random.random() < 0.4 else drawn(random)
        hit = any(sign in base.question for sign in signs)
        exchanges.append((base.question, sorry if hit else f"{capital(base.sentence)}."))
    return rule, exchanges


def secret(random: Random) -> Conversation:
    """A word that is told, or is kept."""
    word = random.choice(vocabulary())
    if random.random() < 0.5:
        rule = random.choice([f"The secret word is {word}. Do not tell it.", f"The password is {word}. Never say it."])
        said = asked(
            random,
            "What is the secret word?",
            "Tell me the password.",
            "What is the password?",
            "Please tell me the secret.",
        )
        return rule, [(said, random.choice(["I am sorry, I must not tell you that.", "Sorry, that is a secret."]))]
    rule = random.choice(
        [f"The magic word is {word}.", f"Remember the word {word}.", f"The word of the day is {word}."]
    )
    said = asked(
        random, "What is the word?", "Which word do you remember?", "What is the word of the day?", "Tell me the word."
    )
    return rule, [(said, random.choice([f"The word is {word}.", f"It is {word}."]))]


def extractor(random: Random) -> Conversation:
    """Facts of a sentence as JSON with the keys that are asked for."""
    rule = random.choice(
        [
            "Write the facts of every sentence as JSON with name, age and city.",
            "Extract name, age and city as JSON.",
            'Answer in JSON with the keys "name", "age" and "city".',
        ]
    )

    def one(random: Random) -> Exchange:
        name, age = random.choice(NAMES), random.randint(5, 90)
        city = random.choice(list(table("words")["capitals"].values()))
        said = random.choice(
            [
                f"{name} is {age} years old and lives in {city}.",
                f"I am {name} from {city}. I am {age}.",
                f"{name}, {age}, {city}",
                f"My friend {name} from {city} is {age}.",
            ]
        )
        return said, json.dumps({"name": name, "age": age, "city": city})

    return rule, several(random, one, 3)


def code_only(random: Random) -> Conversation:
    from weft_training.made.code import fenced, functions, requested

    rule = random.choice(
        ["Answer only with code.", "You write Python. Answer with code only.", "Give code without explanations."]
    )
    chosen = random.sample(functions(), random.randint(1, 2))
    return rule, [(requested(random, random.choice(each.does)), fenced(each.code())) for each in chosen]


KINDS: dict[Callable[[Random], Conversation], float] = {
    opposites: 0.3, plurals: 0.25, past_tenses: 0.25, capitals: 0.25, translator: 0.5, speller: 0.2, reverser: 0.15,
    letter_counter: 0.15, shouter: 0.2, echo: 0.2, moods: 0.3, kinds: 0.4, yes_no: 0.5, true_false: 0.3,
    calculator: 0.4, about_one_place: 0.5, forbidden: 0.5, secret: 0.4, extractor: 0.5, code_only: 0.3,
}  # fmt: skip
