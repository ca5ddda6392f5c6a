"""Numbers: sums and their follow-ups, counting, comparing, sorting, small problems, time, money and shapes."""

from __future__ import annotations

from random import Random

from training.made.asking import asked, capital, listed, ordered
from training.made.exchange import Exchange, Maker, one
from training.made.facts import MONTHS, NAMES

SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
SHAPES = {
    "triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "heptagon": 7, "octagon": 8, "rhombus": 4,
    "parallelogram": 4, "trapezoid": 4, "nonagon": 9, "decagon": 10,
}  # fmt: skip
THINGS = (
    "apples", "books", "pencils", "marbles", "cookies", "eggs", "stickers", "balloons", "flowers", "coins", "cards",
    "oranges", "shells", "sweets", "toys", "stamps", "buttons", "nuts", "candles", "cups", "stones", "pears", "keys",
)  # fmt: skip
UNITS = (
    ("minutes", "an hour", 60), ("seconds", "a minute", 60), ("hours", "a day", 24), ("days", "a week", 7),
    ("months", "a year", 12), ("weeks", "a year", 52), ("years", "a decade", 10), ("years", "a century", 100),
    ("centimetres", "a metre", 100), ("metres", "a kilometre", 1000), ("grams", "a kilogram", 1000),
    ("cents", "a dollar", 100), ("cents", "a euro", 100), ("eggs", "a dozen", 12), ("seasons", "a year", 4),
    ("minutes", "half an hour", 30), ("minutes", "a quarter of an hour", 15), ("millimetres", "a centimetre", 10),
    ("inches", "a foot", 12), ("days", "a leap year", 366), ("days", "a normal year", 365), ("feet", "a yard", 3),
    ("letters", "the English alphabet", 26), ("players", "a football team", 11), ("strings", "a violin", 4),
    ("wheels", "a car", 4), ("wheels", "a bicycle", 2), ("planets", "our solar system", 8), ("millilitres", "a litre", 1000),
)  # fmt: skip
LENGTHS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)))


def in_words(n: int) -> str:
    """
    >>> in_words(0), in_words(42), in_words(100), in_words(215)
    ('zero', 'forty-two', 'one hundred', 'two hundred and fifteen')
    """
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")
    rest = f" and {in_words(n % 100)}" if n % 100 else ""
    return f"{SMALL[n // 100]} hundred{rest}"


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
        f"Please work out {written}.", f"{written}", f"Do you know what {written} is?", f"What do you get for {written}?",
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
            said = asked(random, f"And {name} {b}?", f"And {name} {b}?", f"Now {name} {b}.", f"And that {name} {b}?",
                         f"What is that {name} {b}?", f"And then {name} {b}?")  # fmt: skip
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
            [f"in steps of {word}", f"in steps of {word}", f"by {word}s" if word.isalpha() else f"by {word}"]
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
    said = ordered(random, f"Sort {shown}", f"Sort these numbers: {shown}", f"Put {shown} in order", f"Sort {shown} from smallest to largest",
                   f"Sort the numbers {shown} from small to large")  # fmt: skip
    return said, told(sorted(numbers))


def parity(random: Random) -> list[Exchange]:
    n, other = random.randint(0, 100), random.randint(0, 100)
    kind = "even" if n % 2 == 0 else "odd"
    guess = random.choice(["even", "odd"])
    first = random.choice(
        [(asked(random, f"Is {n} even or odd?", f"Is {n} an even or an odd number?", f"{n}: even or odd?"), f"{n} is {kind}."),
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
    said = asked(random, f"Which number comes {word} {n}?", f"What number comes {word} {n}?", f"What comes {word} {n}?",
                 f"Which number is {'one more' if after else 'one less'} than {n}?")  # fmt: skip
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
    name, friend = random.sample(NAMES, 2)
    thing = random.choice(THINGS)
    a, b = random.randint(2, 20), random.randint(2, 12)
    kind = random.choice(["more", "more", "less", "less", "groups", "share", "together"])
    if kind == "more":
        text = random.choice([f"{name} has {a} {thing} and gets {b} more.", f"{name} has {a} {thing}. {friend} gives {name} {b} more.",
                              f"{name} had {a} {thing} and found {b} more."])  # fmt: skip
        question, way, result = f"How many {thing} does {name} have now?", f"{a} + {b}", a + b
    elif kind == "less":
        a += b
        text = random.choice([f"{name} has {a} {thing} and gives {b} to {friend}.", f"{name} has {a} {thing} and loses {b}.",
                              f"{name} had {a} {thing}. {friend} took {b} of them."])  # fmt: skip
        question, way, result = f"How many {thing} does {name} have left?", f"{a} - {b}", a - b
    elif kind == "groups":
        a = random.randint(2, 10)
        text = random.choice(
            [f"{name} has {a} boxes with {b} {thing} each.", f"There are {a} bags. Each bag has {b} {thing}."]
        )
        question, way, result = f"How many {thing} are there?", f"{a} * {b}", a * b
    elif kind == "share":
        b, result = random.randint(2, 6), random.randint(2, 10)
        a = b * result
        text = f"{name} shares {a} {thing} among {b} friends."
        question, way = f"How many {thing} does each friend get?", f"{a} / {b}"
    else:
        text = f"{name} has {a} {thing} and {friend} has {b}."
        question, way, result = f"How many {thing} do they have together?", f"{a} + {b}", a + b
    start = {"each": "Each friend gets", "there": f"There are {result}"}
    full = {
        "more": f"{name} has {result} {thing} now.", "less": f"{name} has {result} {thing} left.",
        "groups": f"{start['there']} {thing}.", "share": f"{start['each']} {result} {thing}.",
        "together": f"They have {result} {thing} together.",
    }[kind]  # fmt: skip
    exchanges = [
        (
            f"{text} {question}",
            random.choice([full, full, f"{full[:-1]}, because {way} = {result}.", f"{way} = {result}. {full}"]),
        )
    ]
    if random.random() < 0.25:
        exchanges.append(
            (asked(random, "How did you get that?", "Why?", "How do you know?"), f"Because {way} = {result}.")
        )
    return exchanges


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


def hour(random: Random) -> Exchange:
    h, later = random.randint(1, 12), random.randint(1, 6)
    ends = (h + later - 1) % 12 + 1
    many = f"{later} hour{'s' * (later > 1)}"
    m = random.choice([5, 10, 15, 20, 25, 30, 40, 45])
    return random.choice(
        [(asked(random, f"It is {h} o'clock. What time is it in {many}?", f"What time is it {many} after {h} o'clock?"),
          f"It is {ends} o'clock then."),
         (asked(random, f"How many minutes are {later} hours?") if later > 1 else "How many minutes are in one hour?",
          f"{capital(in_words(later))} hour{'s are' if later > 1 else ' is'} {60 * later} minutes."),
         (asked(random, f"The train leaves at {h}:00 and takes {m} minutes. When does it arrive?"),
          f"It arrives at {h}:{m:02}."),
         (asked(random, f"A film starts at {h} o'clock and lasts {many}. When does it end?"), f"The film ends at {ends} o'clock.")]
    )  # fmt: skip


def money(random: Random) -> Exchange:
    price, count, unit = (
        random.randint(1, 12),
        random.randint(2, 9),
        random.choice(["dollars", "euros", "pounds", "coins"]),
    )
    thing = random.choice(["book", "ticket", "pen", "cake", "ball", "hat", "cup", "sandwich", "toy", "pizza"])
    paid = price + random.randint(1, 20)
    cost = f"{price} {unit if price > 1 else unit[:-1]}"
    left = f"{paid - price} {unit if paid - price > 1 else unit[:-1]}"
    return random.choice(
        [(asked(random, f"A {thing} costs {cost}. How much do {count} cost?"), f"They cost {price * count} {unit}."),
         (asked(random, f"A {thing} costs {cost}. I pay with {paid} {unit}. How much do I get back?"), f"You get {left} back."),
         (asked(random, f"I have {paid} {unit} and spend {price}. How much is left?"), f"You have {left} left.")]
    )  # fmt: skip


def shape(random: Random) -> list[Exchange]:
    name, sides = random.choice(list(SHAPES.items()))
    word = random.choice(["sides", "corners"])
    one_of_it = ("an " if name[0] in "aeiou" else "a ") + name
    exchanges = [(asked(random, f"How many {word} does {one_of_it} have?", f"How many {word} are in {one_of_it}?"),
                  random.choice([f"{capital(one_of_it)} has {in_words(sides)} {word}.", f"It has {sides} {word}."]))]  # fmt: skip
    if random.random() < 0.2:
        return [
            (
                asked(random, "How many sides does a circle have?", "How many corners does a circle have?"),
                "A circle is round. It has no corners.",
            )
        ]
    if random.random() < 0.35:
        other, count = random.choice(list(SHAPES.items()))
        one_of_it = ("an " if other[0] in "aeiou" else "a ") + other
        exchanges.append(
            (
                asked(random, f"And {one_of_it}?", f"What about {one_of_it}?"),
                f"{capital(one_of_it)} has {in_words(count)} {word}.",
            )
        )
    return exchanges


def month_length(random: Random) -> list[Exchange]:
    month, other = random.sample(MONTHS, 2)

    def days(of: str) -> str:
        return f"{of} has {LENGTHS[of]} days" + (", or 29 in a leap year." if of == "February" else ".")

    first = (
        asked(random, f"How many days does {month} have?", f"How many days are in {month}?", f"How long is {month}?"),
        days(month),
    )
    if random.random() < 0.4:
        return [
            first,
            (asked(random, f"And {other}?", f"What about {other}?", f"And how many does {other} have?"), days(other)),
        ]
    return [first]


def unit(random: Random) -> list[Exchange]:
    part, whole, count = random.choice(UNITS)
    verb = "There are"
    first = (asked(random, f"How many {part} are in {whole}?", f"How many {part} are there in {whole}?", f"How many {part} does {whole} have?"),
             random.choice([f"{verb} {count} {part} in {whole}.", f"{capital(whole)} has {count} {part}."]))  # fmt: skip
    others = [each for each in UNITS if each[0] == part and each[1] != whole]
    if others and random.random() < 0.4:
        _, whole, count = random.choice(others)
        return [
            first,
            (asked(random, f"And in {whole}?", f"And how many are in {whole}?"), f"{verb} {count} {part} in {whole}."),
        ]
    return [first]


def table(random: Random) -> Exchange:
    n = random.randint(1, 12)
    said = ordered(
        random, f"Write the times table of {n}", f"Show me the {n} times table", f"Say the times table of {n}"
    )
    return said, "\n".join(f"{i} * {n} = {i * n}" for i in range(1, 11)) + "\n\nThat is all."


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
    said = asked(random, f"Add {listed([str(n) for n in numbers])}.", f"What is {' + '.join(map(str, numbers))}?",
                 f"What is {' plus '.join(map(str, numbers))}?")  # fmt: skip
    return said, f"{' + '.join(map(str, numbers))} = {sum(numbers)}."


MAKERS: dict[Maker, float] = {
    sums: 3, counting: 2, one(comparing): 0.5, one(sorting): 0.6, parity: 0.4, neighbour: 0.4, problem: 0.9, doubling: 0.5, one(worded): 0.5,
    one(hour): 0.25, one(money): 0.3, shape: 0.25, month_length: 0.25, unit: 0.35, one(table): 0.1, one(sequence): 0.35, one(summed): 0.25,
}  # fmt: skip
