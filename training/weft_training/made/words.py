"""Words: spelling and grammar, opposites and rhymes, lists, translations, capitals, what is true and what is not."""

from __future__ import annotations

from functools import cache
from random import Random

from weft_training.made import general
from weft_training.made.asking import asked, capital, ordered, table
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.facts import NAMES

SAID = (
    "hello", "good morning", "I like apples", "the cat is asleep", "see you soon", "one two three", "blue bird",
    "I am a robot", "open the door", "Weft", "yes", "happy birthday", "my dog is big", "red lorry, yellow lorry",
    "tick tock", "we are friends", "the sun is out", "bananas are yellow", "nice to meet you", "peace and quiet",
)  # fmt: skip
RELATED = {
    "opposite": (
        ("What is the opposite of {}?", "Give me the opposite of {}.", "Tell me the opposite of {}.", "Opposite of {}?",
         "Can you tell me the opposite of {}?", "Do you know the opposite of {}?", "What is the antonym of {}?"),
        "The opposite of {} is {}.",
    ),
    "synonym": (
        ("What is a synonym of {}?", "Give me a synonym of {}.", "Tell me a synonym for {}.", "Another word for {}?",
         "What is another word for {}?", "Which word means the same as {}?", "Do you know another word for {}?"),
        "Another word for {} is {}.",
    ),
}  # fmt: skip


@cache
def vocabulary() -> tuple[str, ...]:
    """Plain words to spell, to count and to sort."""
    rows = table("words")
    found = [*rows["past"], *rows["plural"], *rows["opposite"], *rows["rhymes"]]
    found += [word for group in rows["groups"].values() for word in group]
    return tuple(sorted({word for word in found if word.isalpha()}))


def spelling(random: Random) -> Exchange:
    word = random.choice([random.choice(vocabulary()), random.choice(vocabulary()), random.choice(NAMES)])
    said = ordered(random, f"Spell the word {word}", f"Spell {word}", f"Spell the word {word} for me")
    if random.random() < 0.2:
        said = asked(random, f"How do you spell {word}?", f"How is {word} spelled?")
    return said, "-".join(word.upper()) + "."


def letters(random: Random) -> list[Exchange]:
    word = random.choice(vocabulary())
    count = len(word)
    say = "letter" if count == 1 else "letters"
    first = (
        asked(
            random,
            f"How many letters does the word {word} have?",
            f"How many letters are in {word}?",
            f"Count the letters of {word}.",
            f"How long is the word {word}?",
        ),
        random.choice([f"The word {word} has {count} {say}.", f"{capital(word)} has {count} {say}."]),
    )
    if random.random() < 0.3:
        return [
            first,
            (
                asked(random, "What is its first letter?", "And the first letter?"),
                f"The first letter is {word[0].upper()}.",
            ),
        ]
    return [first]


def ends(random: Random) -> list[Exchange]:
    word = random.choice(vocabulary())
    at, other = random.sample(["first", "last"], 2)
    letter = {"first": word[0].upper(), "last": word[-1].upper()}
    said = asked(
        random,
        f"What is the {at} letter of {word}?",
        f"Which letter is the {at} of the word {word}?",
        f"Which letter does {word} {'start' if at == 'first' else 'end'} with?",
    )
    exchanges = [(said, random.choice([f"The {at} letter of {word} is {letter[at]}.", f"It is {letter[at]}."]))]
    if random.random() < 0.35:
        exchanges.append(
            (
                asked(random, f"And the {other}?", f"And the {other} letter?"),
                f"The {other} letter of {word} is {letter[other]}.",
            )
        )
    return exchanges


def reverse(random: Random) -> Exchange:
    word = random.choice([each for each in vocabulary() if len(each) < 8])
    said = ordered(random, f"Reverse the word {word}", f"Write {word} backwards", f"Spell {word} backwards")
    return said, random.choice([f"{word[::-1]}.", f"{capital(word)} backwards is {word[::-1]}."])


def cases(random: Random) -> Exchange:
    text = random.choice([random.choice(vocabulary()), random.choice(SAID)])
    if random.random() < 0.7:
        said = ordered(
            random, f"Write {text} in capital letters", f"Write {text} in uppercase", f"Put {text} in capitals"
        )
        return said, text.upper() + "."
    return ordered(
        random, f"Write {text.upper()} in small letters", f"Write {text.upper()} in lowercase"
    ), text.lower() + "."


def echo(random: Random) -> Exchange:
    text = random.choice([*SAID, random.choice(vocabulary()), " ".join(random.sample(vocabulary(), 3))])
    times = random.choice([1, 1, 1, 2, 3])
    if times > 1:
        word = {2: "twice", 3: "three times"}[times]
        return ordered(random, f"Say {text} {word}", f"Repeat {text} {word}"), capital(", ".join([text] * times)) + "."
    said = asked(
        random,
        f"Repeat after me: {text}.",
        f"Say {text}.",
        f"Please say: {text}.",
        f"Can you say {text}?",
        f"Repeat: {text}.",
    )
    return said, capital(text) + "."


def plural(random: Random) -> list[Exchange]:
    rows = table("words")["plural"]
    (single, many), (other, others) = random.sample(list(rows.items()), 2)
    if random.random() < 0.2 and single != many:
        return [(asked(random, f"What is the singular of {many}?"), f"The singular of {many} is {single}.")]
    said = asked(
        random,
        f"What is the plural of {single}?",
        f"Plural of {single}?",
        f"Tell me the plural of {single}.",
        f"One {single}, two ...?",
    )
    exchanges = [(said, random.choice([f"The plural of {single} is {many}.", f"One {single}, two {many}."]))]
    if random.random() < 0.35:
        exchanges.append((asked(random, f"And of {other}?", f"And {other}?"), f"The plural of {other} is {others}."))
    return exchanges


def past(random: Random) -> list[Exchange]:
    rows = table("words")["past"]
    (verb, was), (other, other_was) = random.sample(list(rows.items()), 2)
    said = asked(
        random,
        f"What is the past tense of {verb}?",
        f"Past tense of {verb}?",
        f"What is the past of {verb}?",
        f"Put {verb} into the past tense.",
        f"Today I {verb}, yesterday I ...?",
    )
    exchanges = [(said, random.choice([f"The past tense of {verb} is {was}.", f"Today I {verb}, yesterday I {was}."]))]
    if random.random() < 0.35:
        exchanges.append(
            (
                asked(random, f"And of {other}?", f"And {other}?", f"What about {other}?"),
                f"The past tense of {other} is {other_was}.",
            )
        )
    return exchanges


def related(random: Random) -> list[Exchange]:
    """An opposite or a synonym, and perhaps another."""
    kind = random.choice(["opposite", "opposite", "synonym"])
    (word, found), (other, other_found) = random.sample(list(table("words")[kind].items()), 2)
    forms, told = RELATED[kind]
    answer = told.format(word, found)
    exchanges = [
        (asked(random, *(form.format(word) for form in forms)), random.choice([answer, answer, f"{capital(found)}."]))
    ]
    if random.random() < 0.4:
        said = asked(random, f"And of {other}?", f"And {other}?", f"What about {other}?")
        exchanges.append((said, told.format(other, other_found)))
    return exchanges


def rhyme(random: Random) -> list[Exchange]:
    word, found = random.choice(list(table("words")["rhymes"].items()))
    first, *others = random.sample(found, len(found))
    if random.random() < 0.25:
        return [
            (
                asked(random, f"Does {word} rhyme with {first}?", f"Do {word} and {first} rhyme?"),
                f"Yes, {word} rhymes with {first}.",
            )
        ]
    said = asked(
        random,
        f"What rhymes with {word}?",
        f"Tell me a word that rhymes with {word}.",
        f"Which word rhymes with {word}?",
        f"Find a rhyme for {word}.",
        f"Give me a rhyme for {word}.",
    )
    exchanges = [
        (said, random.choice([f"{capital(first)} rhymes with {word}.", f"{capital(word)} rhymes with {first}."]))
    ]
    if others and random.random() < 0.35:
        exchanges.append(
            (
                asked(random, "Another one?", "And another?", "One more, please."),
                f"{capital(others[0])} rhymes with {word}, too.",
            )
        )
    return exchanges


def alphabet(random: Random) -> Exchange:
    words = random.sample([each for each in vocabulary() if each.islower()], random.randint(2, 5))
    if len(words) == 2:
        early, late = sorted(words)
        said = asked(random, f"Which word comes first in the alphabet, {words[0]} or {words[1]}?")
        return said, f"{capital(early)} comes before {late}."
    shown = ", ".join(words)
    said = ordered(
        random,
        f"Sort these words by the alphabet: {shown}",
        f"Put these words in alphabetical order: {shown}",
        f"Sort alphabetically: {shown}",
    )
    return said, ", ".join(sorted(words)) + "."


def alphabet_letters(random: Random) -> Exchange:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if random.random() < 0.15:
        return ordered(random, "Say the alphabet", "Write the alphabet", "Recite the alphabet"), ", ".join(
            letters
        ) + "."
    at = random.randint(1, 24)
    word, other = random.choice([("after", letters[at + 1]), ("before", letters[at - 1])])
    said = asked(random, f"Which letter comes {word} {letters[at]}?", f"What letter comes {word} {letters[at]}?")
    return said, f"{other} comes {word} {letters[at]}."


MAKERS: dict[Maker, float] = {
    one(spelling): 0.5, letters: 0.4, ends: 0.35, one(reverse): 0.2, one(cases): 0.3, one(echo): 0.5, plural: 0.5,
    past: 0.6, related: 1.1, rhyme: 0.5, one(alphabet): 0.3, one(alphabet_letters): 0.2, **general.MAKERS,
}  # fmt: skip
