"""Numbers: sums and their follow-ups, counting, comparing, sorting, small problems, time, money and shapes."""

from __future__ import annotations

from random import Random

from weft_training.made import amounts
from weft_training.made.asking import asked, capital, in_words, listed, ordered
from weft_training.made.exchange import Exchange, Maker, one
from weft_training.made.facts import NAMES

SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
THINGS = (
    "apples", "books", "pencils", "marbles", "cookies", "eggs", "stickers", "balloons", "flowers", "coins", "cards",
    "oranges", "shells", "sweets", "toys", "stamps", "buttons", "nuts", "candles", "cups", "stones", "pears", "keys",
)  # fmt: skip


def drawn(random: Random) -> tuple[int, str, int, int]:
    """A sum that comes out whole: two numbers, what is done with them, and the result."""
    name = random.choice(["plus", "plus", "minus", "times", "times", "divided by"])
    if name == "times":
        a, b = random.randint(0, 12), random.randint(0, 12)
    elif name == "divided by":
        b, result = random.randint(1, 12), random.randint(0, 12)
        a = b * result
    else:
        high = random.choice([10, 20, 20, 50, 100])
        a, b = random.randint(0, high), random.randint(0, high)
        if name == "minus" and random.random() < 0.9:
            a, b = max(a, b), min(a, b)
    return a, name, b, applied(a, name, b)


def applied(a: int, name: str, b: int) -> int:
    """
    >>> applied(12, "divided by", 4), applied(3, "minus", 5)
    (3, -2)
    """
    return {"plus": a + b, "minus": a - b, "times": a * b}[name] if name != "divided by" else a // b


def sum_asked(random: Random, a: int, name: str, b: int) -> str:
    sign = random.choice([SIGNS[name], SIGNS[name], "x" if name == "times" else SIGNS[name]])
    written = random.choice([f"{a} {name} {b}", f"{a} {name} {b}", f"{a} {sign} {b}", f"{a}{sign}{b}"])
    forms = [
        f"What is {written}?", f"What is {written}?", f"How much is {written}?", f"{written}?", f"{written} = ?",
        f"Can you calculate {written}?", f"Calculate {written}.", f"What's {written}?", f"What does {written} make?",
        f"Please work out {written}.", f"{written}", f"Do you know what {written} is?",
        f"What do you get for {written}?",
    ]  # fmt: skip
    special = {
        "plus": [f"Add {a} and {b}.", f"What is the sum of {a} and {b}?", f"What do {a} and {b} make together?"],
        "minus": [f"Subtract {b} from {a}.", f"What is left if you take {b} from {a}?"],
        "times": [f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?"],
        "divided by": [f"Divide {a} by {b}.", f"How often does {b} go into {a}?"],
    }[name]
    if min(a, b) >= 0 and max(a, b) < 100 and random.random() < 0.12:
        return asked(
            random, f"What is {in_words(a)} {name} {in_words(b)}?", f"How much is {in_words(a)} {name} {in_words(b)}?"
        )
    return asked(random, *forms, *special)


def sum_answered(random: Random, a: int, name: str, b: int) -> str:
    result = applied(a, name, b)
    return random.choice(
        [f"{a} {name} {b} is {result}.", f"{a} {name} {b} is {result}.", f"{a} {SIGNS[name]} {b} = {result}.",
         f"{a} {name} {b} equals {result}."]
    )  # fmt: skip


def sums(random: Random) -> list[Exchange]:
    """A sum, sometimes gone on with: "And plus 3?", "And 4 times 5?"."""
    a, name, b, result = drawn(random)
    exchanges = [(sum_asked(random, a, name, b), sum_answered(random, a, name, b))]
    while random.random() < 0.35 and len(exchanges) < 4:
        if random.random() < 0.6:
            a, (name, b) = result, onward(random, result)
            said = asked(
                random,
                f"And {name} {b}?",
                f"And {name} {b}?",
                f"Now {name} {b}.",
                f"And that {name} {b}?",
                f"What is that {name} {b}?",
                f"And then {name} {b}?",
            )
        else:
            a, name, b, _ = drawn(random)
            said = asked(random, f"And {a} {name} {b}?", f"And what is {a} {name} {b}?", f"And {a} {SIGNS[name]} {b}?")
        result = applied(a, name, b)
        exchanges.append((said, sum_answered(random, a, name, b)))
    return exchanges


def onward(random: Random, n: int) -> tuple[str, int]:
    """What can be done next with a number so that it stays whole and small."""
    ways = [("plus", random.randint(1, 20))]
    if n > 0:
        ways.append(("minus", random.randint(1, min(n, 20))))
    if 0 <= n <= 12:
        ways.append(("times", random.randint(2, 10)))
    parts = [d for d in range(2, 13) if n > 0 and n % d == 0 and n // d <= 12]
    return random.choice([*ways, ("divided by", random.choice(parts))] if parts else ways)


def counting(random: Random) -> list[Exchange]:
    """Counting that ends where it should, and perhaps back or in other steps."""
    step = random.choice([1, 1, 1, 1, 2, 2, 3, 4, 5, 5, 10, 10, 20, 25, 50, 100])
    low = random.choice([0, 0, 1, step, random.randint(0, 90)]) if step < 20 else random.choice([0, step])
    numbers = [low + step * i for i in range(random.randint(2, 21 if step < 20 else 11))]
    down = random.random() < 0.25
    exchanges = [counted(random, numbers[::-1] if down else numbers, step)]
    if random.random() < 0.25:
        other = "up" if down else "down"
        said = asked(random, f"Now count {other}.", f"And now {other}?", "And backwards?", "Now the other way round.")
        exchanges.append((said, told(numbers if down else numbers[::-1])))
    elif random.random() < 0.15:
        more = [numbers[-1] + step * i for i in range(1, 6)]
        said = asked(random, "Go on.", "What comes next?", "Please go on.", "Count on.")
        exchanges.append((said, told(more if not down else [])) if not down else counted(random, more, step))
    return exchanges


def told(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) + "."


def counted(random: Random, numbers: list[int], step: int) -> Exchange:
    """Numbers asked for by their ends and the step.

    >>> counted(Random(6), [0, 5, 10], 5)[1]
    '0, 5, 10.'
    """
    first, last = numbers[0], numbers[-1]
    way = ""
    if step > 1:
        word = random.choice([in_words(step), str(step)])
        way = " " + random.choice(
            [
                f"in steps of {word}",
                f"in steps of {word}",
                f"by {word}s" if word.isalpha() and step <= 10 else f"by {word}",
            ]
        )
    verb = random.choice(["Count down", "Count backwards", "Count back"]) if last < first else "Count"
    spelled = last < 30 and first < 30 and step == 1 and random.random() < 0.15
    end = f"{first} {random.choice(['to', 'to', 'up to', 'until']) if first <= last else 'to'} {last}{way}"
    forms = [f"{verb} from {end}", f"{verb} from {end}"]
    if first == 1 and step == 1:
        forms += [f"Count to {last}", f"Count up to {last}"]
    if step == 1 and first < last:
        forms += [f"List the numbers from {first} to {last}", f"Write the numbers from {first} to {last}"]
    if spelled:
        return ordered(random, f"{verb} from {end} in words"), capital(", ".join(map(in_words, numbers))) + "."
    return ordered(random, *forms), told(numbers)


def comparing(random: Random) -> Exchange:
    a, b = random.sample(range(random.choice([20, 100, 1000])), 2)
    more = random.random() < 0.5
    word = random.choice(["larger", "bigger", "greater"] if more else ["smaller", "less"])
    found, other = (max(a, b), min(a, b)) if more else (min(a, b), max(a, b))
    if random.random() < 0.3:
        is_so = a > b if more else a < b
        start = "Yes" if is_so else "No"
        said = asked(random, f"Is {a} {word} than {b}?", f"Is {a} {word} than {b}?")
        return said, f"{start}, {a} is {word if is_so else 'not ' + word} than {b}."
    said = asked(
        random, f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?", f"What is {word}, {a} or {b}?"
    )
    return said, random.choice([f"{found} is {word} than {other}.", f"{found} is {word}.", f"{found}."])


def sorting(random: Random) -> Exchange:
    numbers = random.sample(range(random.choice([10, 50, 100])), random.randint(3, 6))
    shown = ", ".join(map(str, numbers))
    kind = random.choice(["up", "up", "down", "largest", "smallest"])
    if kind in ("largest", "smallest"):
        word = random.choice(["largest", "biggest", "highest"] if kind == "largest" else ["smallest", "lowest"])
        found = max(numbers) if kind == "largest" else min(numbers)
        said = asked(
            random,
            f"Which is the {word} of {shown}?",
            f"What is the {word} number: {shown}?",
            f"Find the {word} of {shown}.",
        )
        return said, random.choice([f"The {word} number is {found}.", f"{found} is the {word}.", f"{found}."])
    if kind == "down":
        said = ordered(random, f"Sort {shown} from largest to smallest", f"Put {shown} in order from high to low")
        return said, told(sorted(numbers, reverse=True))
    said = ordered(
        random,
        f"Sort {shown}",
        f"Sort these numbers: {shown}",
        f"Put {shown} in order",
        f"Sort {shown} from smallest to largest",
        f"Sort the numbers {shown} from small to large",
    )
    return said, told(sorted(numbers))


def parity(random: Random) -> list[Exchange]:
    n, other = random.randint(0, 100), random.randint(0, 100)
    kind = "even" if n % 2 == 0 else "odd"
    guess = random.choice(["even", "odd"])
    first = random.choice(
        [(asked(random, f"Is {n} even or odd?", f"Is {n} an even or an odd number?", f"{n}: even or odd?"),
          f"{n} is {kind}."),
         (asked(random, f"Is {n} {guess}?", f"Is {n} an {guess} number?"),
          f"Yes, {n} is {kind}." if kind == guess else f"No, {n} is {kind}.")]
    )  # fmt: skip
    if random.random() < 0.4:
        return [
            first,
            (asked(random, f"And {other}?", f"What about {other}?"), f"{other} is {'odd' if other % 2 else 'even'}."),
        ]
    return [first]


def neighbour(random: Random) -> list[Exchange]:
    n, after = random.randint(1, 199), random.random() < 0.5
    word, found = ("after", n + 1) if after else ("before", n - 1)
    said = asked(
        random,
        f"Which number comes {word} {n}?",
        f"What number comes {word} {n}?",
        f"What comes {word} {n}?",
        f"Which number is {'one more' if after else 'one less'} than {n}?",
    )
    exchanges = [
        (said, random.choice([f"{found} comes {word} {n}.", f"The number {word} {n} is {found}.", f"{found}."]))
    ]
    if random.random() < 0.3:
        other, found = ("before", n - 1) if after else ("after", n + 1)
        exchanges.append((asked(random, f"And {other} it?", f"And {other} {n}?"), f"{found} comes {other} {n}."))
    elif random.random() < 0.3:
        return [
            (asked(random, f"Which number is between {n - 1} and {n + 1}?"), f"{n} is between {n - 1} and {n + 1}.")
        ]
    return exchanges


def problem(random: Random) -> list[Exchange]:
    """A word problem of one step, and how it is solved."""
    text, way, result, full = random.choice([more, more, less, less, groups, shared, together])(random)
    because = f"{full[:-1]}, because {way} = {result}."
    exchanges = [(text, random.choice([full, full, because, f"{way} = {result}. {full}"]))]
    if random.random() < 0.25:
        said = asked(random, "How did you get that?", "Why?", "How do you know?")
        exchanges.append((said, f"Because {way} = {result}."))
    return exchanges


Problem = tuple[str, str, int, str]  # what is asked, the sum, its result, and the answer


def more(random: Random) -> Problem:
    (name, friend), thing = random.sample(NAMES, 2), random.choice(THINGS)
    a, b = random.randint(1, 30), random.randint(1, 20)
    text = random.choice(
        [f"{name} has {a} {thing} and gets {b} more.", f"{name} has {a} {thing}. {friend} gives {name} {b} more.",
         f"{name} had {a} {thing} and found {b} more.", f"{name} has {a} {thing} and buys {b} more."]
    )  # fmt: skip
    question = random.choice([f"How many {thing} does {name} have now?", f"How many {thing} does {name} have?"])
    return f"{text} {question}", f"{a} + {b}", a + b, f"{name} has {a + b} {thing} now."


def less(random: Random) -> Problem:
    (name, friend), thing = random.sample(NAMES, 2), random.choice(THINGS)
    b, rest = random.randint(1, 12), random.randint(2, 20)
    a = b + rest
    text = random.choice(
        [f"{name} has {a} {thing} and gives {b} to {friend}.", f"{name} has {a} {thing} and loses {b}.",
         f"{name} had {a} {thing}. {friend} took {b} of them."]
    )  # fmt: skip
    return f"{text} How many {thing} does {name} have left?", f"{a} - {b}", rest, f"{name} has {rest} {thing} left."


def groups(random: Random) -> Problem:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    a, b = random.randint(2, 10), random.randint(2, 12)
    text = random.choice([f"{name} has {a} boxes with {b} {thing} each.", f"There are {a} bags with {b} {thing} each."])
    return f"{text} How many {thing} are there?", f"{a} * {b}", a * b, f"There are {a * b} {thing}."


def shared(random: Random) -> Problem:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    b, each = random.randint(2, 6), random.randint(2, 10)
    text = f"{name} shares {b * each} {thing} among {b} friends. How many {thing} does each friend get?"
    return text, f"{b * each} / {b}", each, f"Each friend gets {each} {thing}."


def together(random: Random) -> Problem:
    (name, friend), thing = random.sample(NAMES, 2), random.choice(THINGS)
    a, b = random.randint(1, 30), random.randint(1, 20)
    text = f"{name} has {a} {thing} and {friend} has {b}. How many {thing} do they have together?"
    return text, f"{a} + {b}", a + b, f"They have {a + b} {thing} together."


def doubling(random: Random) -> list[Exchange]:
    n = random.randint(1, 60)
    if random.random() < 0.5:
        said = asked(
            random, f"What is double {n}?", f"Double {n}.", f"What is twice {n}?", f"How much is two times {n}?"
        )
        exchanges = [(said, random.choice([f"Double {n} is {2 * n}.", f"Twice {n} is {2 * n}.", f"{2 * n}."]))]
    else:
        said = asked(random, f"What is half of {2 * n}?", f"Halve {2 * n}.", f"How much is half of {2 * n}?")
        exchanges = [(said, random.choice([f"Half of {2 * n} is {n}.", f"{n}.", f"It is {n}."]))]
    if random.random() < 0.25:
        m = random.randint(1, 50)
        word, text = random.choice([("double", f"Double {m} is {2 * m}."), ("half of", "")])
        m, text = (m, text) if text else (2 * m, f"Half of {2 * m} is {m}.")
        exchanges.append((asked(random, f"And {word} {m}?", f"And what is {word} {m}?"), text))
    return exchanges


def worded(random: Random) -> Exchange:
    n = random.choice([random.randint(0, 20), random.randint(0, 100), random.randint(100, 999)])
    if random.random() < 0.5:
        said = asked(
            random,
            f"Write {n} in words.",
            f"How do you write {n} in words?",
            f"Spell the number {n}.",
            f"{n} in words?",
        )
        return said, random.choice(
            [f"{capital(in_words(n))}.", f"{n} is written {in_words(n)}.", f"{n} in words is {in_words(n)}."]
        )
    word = in_words(n)
    said = asked(
        random,
        f"Write {word} as a number.",
        f"Write {word} in digits.",
        f"What is {word} in digits?",
        f"Which number is {word}?",
    )
    return said, random.choice([f"{n}.", f"{capital(word)} is {n}.", f"That is {n}."])


def table(random: Random) -> Exchange:
    n = random.randint(1, 12)
    said = ordered(
        random, f"Write the times table of {n}", f"Show me the {n} times table", f"Say the times table of {n}"
    )
    return said, "\n".join(f"{i} * {n} = {i * n}" for i in range(1, 11)) + "."


def sequence(random: Random) -> Exchange:
    step, first = random.choice([1, 2, 3, 5, 10, -1, -2, -5]), random.randint(40, 60)
    if step > 0:
        first = random.choice([0, step, random.randint(1, 40)])
    shown = [first + step * i for i in range(random.randint(3, 5))]
    following = shown[-1] + step
    said = asked(
        random,
        f"What comes next: {told(shown)[:-1]}?",
        f"Which number comes next? {told(shown)[:-1]}",
        f"Continue: {told(shown)[:-1]}",
    )
    return said, random.choice([f"{following} comes next.", f"The next number is {following}."])


def summed(random: Random) -> Exchange:
    numbers = [random.randint(1, 20) for _ in range(random.randint(3, 4))]
    said = asked(
        random,
        f"Add {listed([str(n) for n in numbers])}.",
        f"What is {' + '.join(map(str, numbers))}?",
        f"What is {' plus '.join(map(str, numbers))}?",
    )
    return said, f"{' + '.join(map(str, numbers))} = {sum(numbers)}."


MAKERS: dict[Maker, float] = {
    sums: 3, counting: 2, one(comparing): 0.5, one(sorting): 0.6, parity: 0.4, neighbour: 0.4, problem: 0.9,
    doubling: 0.5, one(worded): 0.5, one(table): 0.1, one(sequence): 0.35, one(summed): 0.25, **amounts.MAKERS,
}  # fmt: skip
