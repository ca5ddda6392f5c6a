"""Greetings, counting, sums, simple questions, small functions: one exchange each."""

from __future__ import annotations

import json
from random import Random

from weft_training.made.everyday_words import plural, table
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.facts import (
    ANIMALS,
    CAPITALS,
    COLOURS,
    DAYS,
    FUNCTIONS,
    MONTHS,
    NAMES,
    OPPOSITES,
    SEASONS,
    USES,
)

WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip


def greeting(random: Random) -> Exchange:
    hello = random.choice(["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "hi", "hello"])
    if random.random() < 0.4:
        name = random.choice(NAMES)
        said = random.choice([f"{hello}! My name is {name}.", f"{hello}, I am {name}.", f"{hello}, I'm {name}!"])
        return said, random.choice(
            [f"Hello, {name}! Nice to meet you. How can I help you?", f"Hi {name}! What can I do for you today?"]
        )
    said = hello + random.choice(["!", ".", "", ", how are you?", "! How are you today?"])
    answers = ["Hello! How can I help you today?", "Hi! What can I do for you?", "Hello! What would you like to know?"]
    if "how are" in said.lower():
        answers = ["I am fine, thank you! How can I help you?", "I am doing well, thanks. What can I do for you?"]
    return said, random.choice(answers)


def farewell(random: Random) -> Exchange:
    said = random.choice(["Goodbye!", "Bye!", "See you later.", "Thank you, bye!", "Good night!", "I have to go now."])
    return said, random.choice(["Goodbye! Have a nice day.", "Bye! It was nice talking to you.", "See you soon!"])


def thanks(random: Random) -> Exchange:
    said = random.choice(["Thanks!", "Thank you!", "Thank you very much.", "Great, thanks.", "That helped, thank you!"])
    return said, random.choice(["You are welcome!", "You're welcome! Is there anything else?", "Happy to help!"])


def about_itself(random: Random) -> Exchange:
    said, answer = random.choice(
        [
            ("Who are you?", "I am a small language model that ships with Weft. I can chat about simple things."),
            ("What is your name?", "I am the small model that comes with Weft. You can call me Weft."),
            ("What can you do?", "I can greet you, answer simple questions, count, tell short stories and write small "
             "Python functions. I am small, so I make mistakes."),
            ("Are you a human?", "No, I am a computer program: a small language model."),
            ("How big are you?", "I am small: I have about 24 million parameters."),
            ("Can you make mistakes?", "Yes. I am a very small model, so please check what I say."),
            ("What is Weft?", "Weft is a program that serves language models that mix attention and recurrent layers."),
        ]
    )  # fmt: skip
    return said, answer


def counting(random: Random) -> Exchange:
    low, length = random.randint(0, 30), random.randint(2, 15)
    step = random.choice([1, 1, 1, 2, 5, 10])
    numbers = [low + step * i for i in range(length)]
    way = "" if step == 1 else f" in steps of {WORDS[step]}"
    if random.random() < 0.25:
        numbers.reverse()
        said = random.choice([f"Count down from {numbers[0]} to {numbers[-1]}{way}.",
                              f"Please count backwards from {numbers[0]} to {numbers[-1]}{way}."])  # fmt: skip
    else:
        said = random.choice([f"Count from {numbers[0]} to {numbers[-1]}{way}.",
                              f"Please count from {numbers[0]} to {numbers[-1]}{way}.",
                              f"Can you count from {numbers[0]} up to {numbers[-1]}{way}?"])  # fmt: skip
    return said, ", ".join(map(str, numbers)) + "."


def sums(random: Random) -> Exchange:
    a, b = random.randint(0, 20), random.randint(0, 20)
    sign, name, result = random.choice([("+", "plus", a + b), ("-", "minus", a - b), ("*", "times", a * b)])
    if name == "times":
        a, b = a % 11, b % 11
        result = a * b
    said = random.choice([f"What is {a} {sign} {b}?", f"What is {a} {name} {b}?", f"How much is {a} {name} {b}?",
                          f"{a} {sign} {b} = ?"])  # fmt: skip
    return said, random.choice([f"{a} {name} {b} is {result}.", f"{a} {sign} {b} = {result}.", f"It is {result}."])


def neighbours(random: Random) -> Exchange:
    """The number, day or month before or after."""
    kind = random.choice(["number", "day", "month"])
    if kind == "number":
        n, after = random.randint(1, 99), random.random() < 0.5
        return f"Which number comes {'after' if after else 'before'} {n}?", f"{n + 1 if after else n - 1}."
    line = DAYS if kind == "day" else MONTHS
    at, after = random.randrange(len(line)), random.random() < 0.5
    other = line[(at + (1 if after else -1)) % len(line)]
    word = "after" if after else "before"
    said = random.choice([f"Which {kind} comes {word} {line[at]}?", f"What {kind} is {word} {line[at]}?"])
    return said, random.choice([f"{other} comes {word} {line[at]}.", f"{other}."])


def lists(random: Random) -> Exchange:
    kind = random.choice(["days", "months", "seasons", "colours", "animals", "numbers"])
    if kind == "days":
        return "What are the days of the week?", "The days of the week are " + _listed(DAYS) + "."
    if kind == "months":
        return "Name the months of the year.", "The months are " + _listed(MONTHS) + "."
    if kind == "seasons":
        return "What are the four seasons?", "The four seasons are " + _listed(list(SEASONS)) + "."
    count = random.randint(2, 5)
    if kind == "colours":
        found = random.sample(sorted(set(COLOURS.values())), count)
    elif kind == "animals":
        found = random.sample(sorted(ANIMALS), count)
    else:
        found = WORDS[1 : count + 1]
    said = random.choice([f"Name {WORDS[count]} {kind}.", f"Can you tell me {WORDS[count]} {kind}?",
                          f"Give me a list of {WORDS[count]} {kind}."])  # fmt: skip
    if "list" in said:
        return said, "\n".join(f"{i}. {item}" for i, item in enumerate(found, 1))
    return said, _listed(found).capitalize() + "."


def _listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def article(word: str) -> str:
    """
    >>> article("owl"), article("cat")
    ('an owl', 'a cat')
    """
    return ("an " if word[0] in "aeiou" else "a ") + word


def animal(random: Random) -> Exchange:
    name, (sound, legs, young, has) = random.choice(sorted(ANIMALS.items()))
    one = article(name)
    return random.choice(
        [
            (f"What sound does {one} make?", f"{one.capitalize()} makes the sound: {sound}."),
            (f"How many legs does {one} have?", f"{one.capitalize()} has {legs} legs."),
            (f"What is a young {name} called?", f"A young {name} is called {article(young)}."),
            (f"Tell me something about {one}.", f"{one.capitalize()} has {has}. It has {legs} legs, and its young "
             f"is called {article(young)}."),
            (f"What does {one} look like?", f"{one.capitalize()} has {has}."),
        ]
    )  # fmt: skip


def colour(random: Random) -> Exchange:
    thing, found = random.choice(sorted(COLOURS.items()))
    said = random.choice([f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?"])
    return said, random.choice([f"{thing[0].upper()}{thing[1:]} is {found}.", f"It is {found}."])


def capital(random: Random) -> Exchange:
    country, city = random.choice(sorted(CAPITALS.items()))
    if random.random() < 0.2:
        return f"Where is {city}?", f"{city} is the capital of {country}."
    said = random.choice([f"What is the capital of {country}?", f"Which city is the capital of {country}?",
                          f"Tell me the capital of {country}."])  # fmt: skip
    return said, random.choice([f"The capital of {country} is {city}.", f"{city} is the capital of {country}."])


def opposite(random: Random) -> Exchange:
    one, other = random.choice(sorted(OPPOSITES.items()))
    if random.random() < 0.5:
        one, other = other, one
    said = random.choice([f"What is the opposite of {one}?", f"Give me the opposite of {one}."])
    return said, random.choice([f"The opposite of {one} is {other}.", f"{other.capitalize()}."])


def use(random: Random) -> Exchange:
    thing, purpose = random.choice(sorted(USES.items()))
    if random.random() < 0.3:
        return f"What do I need to {purpose}?", f"You need {thing} to {purpose}."
    verb = "are" if thing in ("scissors", "glasses") else "is"
    said = random.choice([f"What {verb} {thing} for?", f"What can I do with {thing}?", f"Why do people use {thing}?"])
    return said, random.choice([f"You use {thing} to {purpose}.", f"With {thing} you can {purpose}."])


def season(random: Random) -> Exchange:
    name, told = random.choice(sorted(SEASONS.items()))
    said = random.choice([f"What happens in {name}?", f"What is {name} like?", f"Tell me about {name}."])
    return said, f"In {name}, {told}."


def spelling(random: Random) -> Exchange:
    word = random.choice([*ANIMALS, *OPPOSITES, *NAMES])
    if random.random() < 0.4:
        return f"How many letters does the word {word} have?", f"The word {word} has {len(word)} letters."
    return f"Spell the word {word}.", "-".join(word.upper()) + "."


def function(random: Random) -> Exchange:
    name, parameters, body, does = random.choice(FUNCTIONS)
    said = random.choice([f"Write a Python function that {does}.", f"Write a function that {does}.",
                          f"Can you write a Python function that {does}?",
                          f"Show me a small Python function which {does}."])  # fmt: skip
    code = f"```python\ndef {name}({parameters}):\n    {body}\n```"
    return said, random.choice([code, f"Here it is:\n\n{code}", f"{code}\n\nThis function {does}."])


def story(random: Random) -> Exchange:
    """A few sentences of a fixed frame, so that stories begin, go on and end."""
    name, friend = random.sample(NAMES, 2)
    pet = random.choice(sorted(ANIMALS))
    place = random.choice(["in a small village", "near a forest", "by the sea", "in a big city", "on a farm"])
    lost = random.choice(["a red ball", "a golden key", "an old map", "a little boat", "a blue hat"])
    found = random.choice(["under a tree", "behind the house", "next to the river", "in the garden", "on the roof"])
    end = random.choice(["They went home and had soup.", "They laughed all the way home.",
                         "From that day on they were best friends.", "They told everyone about it."])  # fmt: skip
    told = (
        f"Once upon a time there was a child called {name} who lived {place} with {article(pet)}. One morning {name} "
        f"could not find {lost}. {friend} came to help, and together they looked everywhere. At last the {pet} "
        f"found it {found}. {name} was very happy and said thank you. {end}"
    )
    said = random.choice(["Tell me a story.", "Tell me a short story.", f"Tell me a story about {name}.",
                          f"Tell me a story about {article(pet)}.", "Can you tell me a little story?"])  # fmt: skip
    return said, told


def unknown(random: Random) -> Exchange:
    """What so small a model should not pretend to know."""
    said = random.choice(
        ["What is the weather today?", "What time is it?", "Who will win the match tomorrow?", "What did I eat today?",
         "What is my phone number?", "How much does this cost?", "What is the news today?"]
    )  # fmt: skip
    return said, random.choice(
        ["I am sorry, I cannot know that. I am a small model without access to the world.",
         "I do not know that, sorry. I can only talk about what I was trained on."]
    )  # fmt: skip


def recall(random: Random) -> Exchange:
    """The name that somebody gave is asked back in the same message: attention has to find it."""
    name, thing = random.choice(NAMES), random.choice(sorted(USES))
    return random.choice(
        [
            (f"My name is {name}. What is my name?", f"Your name is {name}."),
            (f"I have {thing}. What do I have?", f"You have {thing}."),
            (f"{name} likes {plural(random.choice(sorted(ANIMALS)))}. Who likes animals?", f"{name} does."),
        ]
    )


def as_json(random: Random) -> Exchange:
    """Something small in JSON."""
    name, age, city = random.choice(NAMES), random.randint(3, 90), random.choice(sorted(CAPITALS.values()))
    said, value = random.choice(
        [
            (f"Write a JSON object with the name {name} and the age {age}.", {"name": name, "age": age}),
            (
                f"{name} is {age} years old and lives in {city}. Answer in JSON.",
                {"name": name, "age": age, "city": city},
            ),
            (f"Give me JSON for a city named {city}.", {"city": city}),
            (f"{name} lives in {city}. Give me that as JSON.", {"name": name, "city": city}),
        ]
    )
    return said, json.dumps(value)


def told_and_asked(random: Random) -> tuple[Exchange, Exchange]:
    """What somebody says of himself, and the question that needs it, for the two ends of a conversation."""
    name, friend = random.sample(NAMES, 2)
    pet, city = random.choice(table("talk")["slots"]["pet"]), random.choice(sorted(CAPITALS.values()))
    return random.choice(
        [
            ((f"Hello! My name is {name}.", f"Hello, {name}! Nice to meet you. How can I help you?"),
             (random.choice(["What is my name?", "Do you remember my name?"]), f"Your name is {name}.")),
            ((f"My best friend is called {friend}.", f"{friend} is a nice name. It is good to have a best friend."),
             ("What is my best friend called?", f"Your best friend is called {friend}.")),
            ((f"I have {article(pet)} called {friend}.", f"How nice! I hope {friend} is well."),
             (f"What is my {pet} called?", f"Your {pet} is called {friend}.")),
            ((f"I live in {city}.", f"{city} is a beautiful city. How can I help you?"),
             ("Where do I live?", f"You live in {city}.")),
        ]
    )  # fmt: skip


MAKERS: dict[Maker, float] = {
    one(about_itself): 0.7, one(counting): 2, one(sums): 2, one(neighbours): 1, one(lists): 1, one(animal): 1.5,
    one(colour): 1, one(capital): 1.5, one(opposite): 1, one(use): 1.5, one(season): 0.5, one(spelling): 0.7,
    one(function): 3, one(story): 2, one(unknown): 0.6, one(recall): 1, one(as_json): 0.7,
}  # fmt: skip
