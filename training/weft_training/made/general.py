"""Small general knowledge: lists of things, translations, capitals, the calendar, what is true and what is not."""

from __future__ import annotations

from random import Random

from weft_training.made.asking import SMALL, asked, capital, listed, ordered, table
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.facts import DAYS, MONTHS

LANGUAGES = ("Spanish", "French", "German")
TRANSLATED = (
    "What is {} in {}?", "How do you say {} in {}?", "Translate {} into {}.", "What is the {1} word for {0}?",
    "How do I say {} in {}?",
)  # fmt: skip
CAPITALS_ASKED = (
    "What is the capital of {}?", "What is the capital of {}?", "Which city is the capital of {}?", "Capital of {}?",
    "Tell me the capital of {}.", "What's the capital city of {}?", "Do you know the capital of {}?",
    "Name the capital of {}.",
)  # fmt: skip
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip
# Groups of which no word belongs to another one as well.
APART = (
    "animals", "fruits", "colours", "tools", "instruments", "sports", "drinks", "countries", "vehicles", "rooms",
    "trees", "planets", "shapes", "languages", "metals", "pieces_of_furniture",
)  # fmt: skip


def named(group: str) -> str:
    """
    >>> named("sea_animals")
    'sea animals'
    """
    return group.replace("_", " ")


def lists(random: Random) -> list[Exchange]:
    """Some things of a kind, in a sentence or as a list; perhaps some more."""
    group, items = random.choice(list(table("words")["groups"].items()))
    count = random.randint(2, min(6, len(items) - 1))
    found = random.sample(items, len(items))
    kind, many = named(group), random.choice([SMALL[count], SMALL[count], str(count)])
    numbered = random.random() < 0.3
    forms = (
        [f"Make a list of {many} {kind}", f"Give me a list of {many} {kind}", f"List {many} {kind}"]
        if numbered
        else [f"Name {many} {kind}", f"Tell me {many} {kind}", f"Give me {many} {kind}", f"Say {many} {kind}"]
    )
    told = "\n".join(f"{i}. {capital(each)}" for i, each in enumerate(found[:count], 1))
    exchanges = [(ordered(random, *forms), told if numbered else f"{capital(listed(found[:count]))}.")]
    if random.random() < 0.3:
        exchanges.append(
            (
                asked(random, "One more, please.", "Another one?", "And one more?", "Can you name another?"),
                f"{capital(found[count])}.",
            )
        )
    return exchanges


def misfit(random: Random) -> list[Exchange]:
    group, other = random.sample(APART, 2)
    rows = table("words")["groups"]
    wrong = random.choice([each for each in rows[other] if each not in rows[group]])
    words = [*random.sample(rows[group], 3), wrong]
    random.shuffle(words)
    shown, why = ", ".join(words), f"the others are {named(group)}"
    said = asked(random, f"Which word does not fit: {listed(words, 'or')}?", f"Which one is the odd one out: {shown}?",
                 f"Which word does not belong: {shown}?")  # fmt: skip
    answers = [f"{capital(wrong)} does not fit, because {why}.", f"{capital(wrong)}, because {why}."]
    exchanges = [(said, random.choice(answers))]
    if random.random() < 0.2:
        exchanges.append((asked(random, "Why?", "Why is that?"), f"Because {why}, but {wrong} is not one of them."))
    return exchanges


def complete(random: Random) -> Exchange:
    start, end = random.choice(list(table("words")["sentences"].items()))
    said = asked(
        random,
        f"Complete the sentence: {start} ...",
        f"Finish the sentence: {start} ...",
        f"{start} ...?",
        f"Fill in the gap: {start} ___.",
        f"Which word is missing: {start} ___?",
    )
    return said, random.choice([f"{start} {end}.", f"{start} {end}.", f"{capital(end)}."])


def translate(random: Random) -> list[Exchange]:
    (word, found), (other, others) = random.sample(list(table("words")["translations"].items()), 2)
    at, second = random.sample(range(3), 2)
    language, another = LANGUAGES[at], LANGUAGES[second]
    if random.random() < 0.2:
        said = asked(random, f"What does the {language} word {found[at]} mean?", f"What is {found[at]} in English?")
        return [(said, f"The {language} word {found[at]} means {word}.")]
    said = asked(random, *(form.format(word, language) for form in TRANSLATED))
    answers = [f"The {language} word for {word} is {found[at]}.", f"{capital(word)} in {language} is {found[at]}."]
    exchanges = [(said, random.choice(answers))]
    chance = random.random()
    if chance < 0.25:
        exchanges.append(
            (asked(random, f"And in {another}?", f"And {another}?"), f"In {another} it is {found[second]}.")
        )
    elif chance < 0.45:
        said = asked(random, f"And {other}?", f"What about {other}?")
        exchanges.append((said, f"{capital(other)} in {language} is {others[at]}."))
    return exchanges


def capital_city(random: Random) -> list[Exchange]:
    (country, city), (other, other_city) = random.sample(list(table("words")["capitals"].items()), 2)
    if random.random() < 0.3:
        return country_of(random, country, city, other, other_city)
    said = asked(random, *(form.format(country) for form in CAPITALS_ASKED))
    answers = ["The capital of {} is {}.", "{1} is the capital of {0}."]
    exchanges = [(said, random.choice(answers).format(country, city))]
    if random.random() < 0.4:
        said = asked(random, f"And of {other}?", f"And of {other}?", f"And {other}?", f"What about {other}?",
                     f"And the capital of {other}?")  # fmt: skip
        exchanges.append((said, random.choice(answers).format(other, other_city)))
    return exchanges


def country_of(random: Random, country: str, city: str, other: str, other_city: str) -> list[Exchange]:
    """The country of a capital, and perhaps that of another."""
    said = asked(random, f"Which country is {city} in?", f"Where is {city}?", f"In which country is {city}?",
                 f"{city} is the capital of which country?")  # fmt: skip
    answers = [f"{city} is in {country}. It is the capital.", f"{city} is the capital of {country}."]
    exchanges = [(said, random.choice(answers))]
    if random.random() < 0.35:
        said = asked(random, f"And {other_city}?", f"And where is {other_city}?")
        exchanges.append((said, f"{other_city} is the capital of {other}."))
    return exchanges


def calendar(random: Random) -> list[Exchange]:
    kind, line, whole = random.choice([("day", DAYS, "week"), ("month", MONTHS, "year")])
    at = random.randrange(len(line))
    if random.random() < 0.25:
        ordinal = ORDINALS[at]
        said = asked(
            random, f"What is the {ordinal} {kind} of the {whole}?", f"Which {kind} is number {at + 1} of the {whole}?"
        )
        return [(said, f"{line[at]} is the {ordinal} {kind} of the {whole}.")]
    word, other = random.sample(["after", "before"], 2)
    found = {"after": line[(at + 1) % len(line)], "before": line[at - 1]}
    said = asked(random, f"Which {kind} comes {word} {line[at]}?", f"What {kind} is {word} {line[at]}?",
                 f"What comes {word} {line[at]}?")  # fmt: skip
    exchanges = [(said, f"{found[word]} comes {word} {line[at]}.")]
    if random.random() < 0.35:
        said = asked(random, f"And {other} it?", f"And {other} {line[at]}?")
        exchanges.append((said, f"{found[other]} comes {other} {line[at]}."))
    return exchanges


def kind_of(random: Random) -> list[Exchange]:
    """Whether something is of a kind."""
    thing, (right, wrong) = random.choice(list(table("words")["facts"].items()))
    if random.random() < 0.25:
        said = asked(random, f"Is {thing} {right} or {wrong}?", f"What is {thing}: {right} or {wrong}?")
        return [(said, f"{capital(thing)} is {right}.")]
    true = random.random() < 0.5
    said = asked(
        random,
        f"Is {thing} {right if true else wrong}?",
        f"Is {thing} {right if true else wrong}?",
        f"Tell me, is {thing} {right if true else wrong}?",
    )
    answer = (
        f"Yes, {thing} is {right}."
        if true
        else f"No, {thing} is not {wrong}. {'It' if thing != 'the Earth' else 'The Earth'} is {right}."
    )
    if not true and random.random() < 0.3:
        return [
            (said, f"No, {thing} is not {wrong}."),
            (asked(random, "What is it then?", "So what is it?"), f"{capital(thing)} is {right}."),
        ]
    return [(said, answer)]


def statement(random: Random) -> list[Exchange]:
    true = random.random() < 0.5
    text, why = random.choice(list(table("words")["statements" if true else "falsehoods"].items()))
    said = asked(
        random,
        f"True or false: {text}.",
        f"Is this true? {text}.",
        f"{text}. True or false?",
        f"Is it true or false: {text}?",
    )
    short, full = ("True", f"True. {why}") if true else ("False", f"False. {why}")
    if "Is this true" in said or "is this true" in said:
        full, short = ("Yes, that is true. " if true else "No, that is not true. ") + why, "Yes" if true else "No"
    if random.random() < 0.3:
        return [(said, f"{short}."), (asked(random, "Why?", "Can you explain?", "Why is that?"), why)]
    return [(said, full)]


MAKERS: dict[Maker, float] = {
    lists: 1, misfit: 0.4, one(complete): 0.4, translate: 0.8, capital_city: 1.2, calendar: 0.4, kind_of: 0.6,
    statement: 0.4,
}  # fmt: skip
