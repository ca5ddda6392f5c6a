"""Families of small functions: a constant stands in the request and in the code."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from weft_training.made.asking import SMALL
from weft_training.made.code import Function

ORDINALS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 10: "tenth"}
Family = Callable[[Random], Function]


def number(random: Random, n: int) -> str:
    """In words or in digits."""
    return SMALL[n] if n < 13 and random.random() < 0.5 else str(n)


def every(random: Random) -> Function:
    n, start = random.choice(list(ORDINALS)), random.choice([0, 0, 0, 1])
    begins = f"{start or ''}::{n}"
    where = "" if not start else ", beginning with the second"
    kind, of = random.choice(
        [("item of a list", "items"), ("letter of a text", "text"), ("element of a list", "items")]
    )
    does = (f"returns every {ORDINALS[n]} {kind}{where}", f"takes every {ORDINALS[n]} {kind}{where}")
    calls = ("[1, 2, 3, 4, 5, 6, 7, 8]", "[10, 20, 30, 40]") if of == "items" else ("'abcdefgh'", "'python'")
    return Function(f"every_{ORDINALS[n]}", of, f"return {of}[{begins}]", does, calls)


def ends(random: Random) -> Function:
    n = random.randint(2, 10)
    first = random.random() < 0.5
    word = "first" if first else "last"
    cut = f":{n}" if first else f"-{n}:"
    kind, of = random.choice(
        [("items of a list", "items"), ("letters of a text", "text"), ("elements of a list", "items")]
    )
    does = (f"returns the {word} {number(random, n)} {kind}", f"gets the {word} {number(random, n)} {kind}")
    calls = ("[1, 2, 3, 4, 5, 6]", "[5]") if of == "items" else ("'abcdefgh'", "'hi'")
    return Function(f"{word}_{SMALL[n]}", of, f"return {of}[{cut}]", does, calls)


def without_ends(random: Random) -> Function:
    n = random.randint(2, 9)
    word, cut = random.choice([("first", f"{n}:"), ("last", f":-{n}")])
    does = (
        f"removes the {word} {number(random, n)} items of a list",
        f"returns a list without its {word} {number(random, n)} items",
    )
    return Function(
        f"without_{word}_{SMALL[n]}",
        "items",
        f"return items[{cut}]",
        does,
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "[1, 2, 3]"),
    )


def compared(random: Random) -> Function:
    n = random.choice([0, 1, 2, 3, 5, 7, 10, 12, 15, 20, 25, 50, 100, 1000])
    word, sign = random.choice([("greater", ">"), ("less", "<"), ("larger", ">"), ("smaller", "<")])
    kind = random.choice(["keep", "count", "sum", "is"])
    calls = (f"[{n - 1}, {n}, {n + 1}, {n + 5}]", f"[{n + 2}, {n - 3}]")
    name = f"{word}_than_{n}"
    if kind == "is":
        asks = (f"tells whether a number is {word} than {n}", f"checks if a number is {word} than {n}")
        return Function(f"is_{name}", "n", f"return n {sign} {n}", asks, (str(n + 1), str(n - 1)))
    if kind == "keep":
        start = random.choice(["returns the items", "returns all numbers", "returns the numbers of a list that are"])
        does = (f"{start} {word} than {n}", f"keeps the numbers of a list that are {word} than {n}")
        return Function(name, "numbers", f"return [n for n in numbers if n {sign} {n}]", does, calls)
    if kind == "count":
        does = (f"counts the numbers {word} than {n}", f"returns how many numbers of a list are {word} than {n}")
        return Function(f"count_{name}", "numbers", f"return sum(1 for n in numbers if n {sign} {n})", does, calls)
    does = (f"adds up the numbers {word} than {n}", f"returns the sum of all numbers {word} than {n}")
    return Function(f"sum_{name}", "numbers", f"return sum(n for n in numbers if n {sign} {n})", does, calls)


def removed(random: Random) -> Function:
    n = random.choice([0, 1, 2, 3, 5, 10, 20, 50, 100])
    word, sign = random.choice([("greater", "<="), ("less", ">=")])
    does = (f"removes the numbers {word} than {n} from a list", f"returns a list without numbers {word} than {n}")
    return Function(
        f"remove_{word}_than_{n}",
        "numbers",
        f"return [n for n in numbers if n {sign} {n}]",
        does,
        (f"[{n - 1}, {n}, {n + 1}]",),
    )


def constant(random: Random) -> Function:
    n = random.randint(2, 30)
    verb, sign, name, link = random.choice(
        [
            ("adds", "+", "add", "to"),
            ("multiplies", "*", "multiply_by", "by"),
            ("subtracts", "-", "subtract", "from"),
            ("divides", "/", "divide_by", "by"),
        ]
    )
    whole = random.random() < 0.5
    of, what = ("numbers", "every number of a list") if whole else ("x", "a number")
    does = f"{verb} {n} {link} {what}" if link in ("to", "from") else f"{verb} {what} by {n}"
    body = f"return [n {sign} {n} for n in numbers]" if whole else f"return x {sign} {n}"
    calls = (f"[{n}, {3 * n}]", f"[{2 * n}]") if whole else (str(n), str(2 * n))
    return Function(f"{name}_{n}", of, body, (does,), calls)


def starting(random: Random) -> Function:
    letter = random.choice("abcdefghilmnoprstw")
    keep, end = random.random() < 0.6, random.random() < 0.35
    method, word = ("endswith", "end") if end else ("startswith", "start")
    verb, no = ("keeps", "") if keep else ("removes", "not ")
    does = (
        f"{verb} the words that {word} with {letter}",
        f"{verb} all words of a list that {word} with the letter {letter}",
    )
    body = f'return [word for word in words if {no}word.{method}("{letter}")]'
    return Function(
        f"{plain_name(verb)}_words_with_{letter}",
        "words",
        body,
        does,
        (f"['{letter}x{letter}', 'fox']", f"['tree', '{letter}o']"),
    )


def plain_name(verb: str) -> str:
    """
    >>> plain_name("keeps")
    'keep'
    """
    return verb[:-1]


def longer(random: Random) -> Function:
    n = random.randint(2, 10)
    word, sign = random.choice([("longer", ">"), ("shorter", "<")])
    kind = random.choice(["keep", "remove", "count"])
    calls = ("['a', 'tree', 'elephant', 'strawberries']", "['cat', 'giraffe']")
    if kind == "count":
        does = (
            f"counts the words {word} than {number(random, n)} letters",
            f"returns how many words are {word} than {number(random, n)} letters",
        )
        return Function(
            f"count_{word}_than_{n}", "words", f"return sum(1 for word in words if len(word) {sign} {n})", does, calls
        )
    if kind == "remove":
        sign = {">": "<=", "<": ">="}[sign]
    does = (
        f"{kind}s the words {word} than {number(random, n)} letters",
        f"{kind}s all words of a list that are {word} than {number(random, n)} letters",
    )
    return Function(
        f"{kind}_{word}_than_{n}", "words", f"return [word for word in words if len(word) {sign} {n}]", does, calls
    )


def repeated(random: Random) -> Function:
    n = random.randint(2, 12)
    times = {2: "twice"}.get(n, f"{number(random, n)} times")
    kind = random.choice(["text", "list", "join"])
    if kind == "list":
        does = (f"returns a list with a value {times}", f"repeats a value {times} in a list")
        return Function(f"list_of_{SMALL[n]}", "value", f"return [value] * {n}", does, ("5", "'a'"))
    if kind == "join":
        does = (f"repeats a word {times} with spaces", f"returns a word {times} with spaces between")
        return Function(f"say_{SMALL[n]}_times", "word", f'return " ".join([word] * {n})', does, ("'hi'", "'no'"))
    return Function(
        f"repeat_{SMALL[n]}_times",
        "text",
        f"return text * {n}",
        (f"repeats a text {times}", f"returns a string {times}"),
        ("'ha'", "'ab'"),
    )


def divisible(random: Random) -> Function:
    n = random.randint(3, 12)
    kind = random.choice(["is", "keep", "count"])
    by = f"divisible by {number(random, n)}"
    if kind == "is":
        return Function(
            f"is_divisible_by_{n}",
            "n",
            f"return n % {n} == 0",
            (f"tells whether a number is {by}", f"checks if a number is {by}"),
            (str(2 * n), str(n + 1)),
        )
    if kind == "keep":
        return Function(
            f"divisible_by_{n}",
            "numbers",
            f"return [n for n in numbers if n % {n} == 0]",
            (f"keeps the numbers that are {by}", f"returns all numbers of a list that are {by}"),
            (f"[{n}, {n + 1}, {3 * n}]",),
        )
    return Function(
        f"count_divisible_by_{n}",
        "numbers",
        f"return sum(1 for n in numbers if n % {n} == 0)",
        (f"counts the numbers that are {by}", f"returns how many numbers are {by}"),
        (f"[{n}, {n + 1}, {3 * n}]",),
    )


def multiples(random: Random) -> Function:
    n = random.randint(2, 25)
    does = (f"returns the first multiples of {n}", f"lists the multiples of {n}")
    return Function(f"multiples_of_{n}", "count", f"return [{n} * i for i in range(1, count + 1)]", does, ("3", "5"))


def wrapped(random: Random) -> Function:
    mark, name = random.choice(
        [
            ("!", "exclamation mark"),
            ("?", "question mark"),
            (".", "full stop"),
            ("*", "star"),
            ("-", "dash"),
            ("#", "hash"),
        ]
    )
    front = random.random() < 0.5
    where = "start" if front else "end"
    body = f'return "{mark}" + text' if front else f'return text + "{mark}"'
    article = "an" if name[0] in "aeiou" else "a"
    does = (f"adds {article} {name} to the {where} of a text", f"puts {article} {name} at the {where} of a string")
    return Function(f"add_{name.replace(' ', '_')}", "text", body, does, ("'hello'", "'yes'"))


def counted(random: Random) -> Function:
    letter = random.choice("abcdefghilmnoprstuw")
    kind = random.choice(["count", "has", "remove"])
    if kind == "has":
        return Function(
            f"has_{letter}",
            "text",
            f'return "{letter}" in text',
            (f"tells whether a text has the letter {letter}", f"checks if the letter {letter} is in a word"),
            ("'banana'", "'sky'"),
        )
    if kind == "remove":
        return Function(
            f"remove_{letter}",
            "text",
            f'return text.replace("{letter}", "")',
            (f"removes every {letter} from a text", f"deletes the letter {letter} from a string"),
            ("'banana'", "'history'"),
        )
    return Function(
        f"count_{letter}",
        "text",
        f'return text.count("{letter}")',
        (f"counts the letter {letter} in a text", f"returns how often the letter {letter} occurs in a word"),
        ("'banana'", "'history'"),
    )


def replaced(random: Random) -> Function:
    letter, other = random.sample("abcdefghilmnoprstuwxz", 2)
    does = (f"replaces every {letter} by {other}", f"replaces the letter {letter} by {other} in a text")
    body = f'return text.replace("{letter}", "{other}")'
    return Function(f"replace_{letter}", "text", body, does, ("'banana'", "'history'"))


def power(random: Random) -> Function:
    n = random.randint(2, 10)
    kind = random.choice(["power", "list", "root"])
    if kind == "power":
        return Function(
            f"power_of_{SMALL[n]}",
            "x",
            f"return x ** {n}",
            (
                f"raises a number to the power of {number(random, n)}",
                f"computes a number to the power of {number(random, n)}",
            ),
            ("2", "1"),
        )
    if kind == "list":
        return Function(
            f"powers_of_{SMALL[n]}",
            "count",
            f"return [{n} ** i for i in range(count)]",
            (f"returns the first powers of {number(random, n)}", f"lists the powers of {number(random, n)}"),
            ("3", "4"),
        )
    return Function(
        f"powers_{n}",
        "numbers",
        f"return [x ** {n} for x in numbers]",
        (f"raises every number of a list to the power of {number(random, n)}",),
        ("[1, 2]", "[0, 3]"),
    )


def stepped(random: Random) -> Function:
    n = random.randint(2, 25)
    kind = random.choice(["to", "step", "down"])
    if kind == "to":
        return Function(
            f"count_to_{n}",
            "",
            f"return list(range(1, {n + 1}))",
            (f"returns the numbers from 1 to {n}", f"makes a list of the numbers from 1 to {n}"),
            ("",),
        )
    if kind == "down":
        return Function(
            f"count_down_from_{n}",
            "",
            f"return list(range({n}, 0, -1))",
            (f"counts down from {n} to 1", f"returns the numbers from {n} down to 1"),
            ("",),
        )
    return Function(
        f"count_by_{n}",
        "end",
        f"return list(range(0, end + 1, {n}))",
        (
            f"counts from zero in steps of {number(random, n)}",
            f"returns the numbers from 0 to an end in steps of {number(random, n)}",
        ),
        (str(3 * n), str(4 * n)),
    )


def defaulted(random: Random) -> Function:
    word = random.choice(
        ["Hello", "Hi", "Good morning", "Good night", "Welcome", "Thank you", "Well done", "Happy birthday", "Goodbye"]
    )
    name = word.lower().replace(" ", "_")
    return Function(
        f"say_{name}",
        "name",
        f'return f"{word}, {{name}}!"',
        (f"says {word} to somebody", f"returns the text {word} with a name"),
        ("'Anna'", "'Tom'"),
    )


def item(random: Random) -> Function:
    n = random.choice(list(ORDINALS))
    kind, of = random.choice([("item of a list", "items"), ("letter of a word", "word"), ("word of a text", "text")])
    taken = {"items": "items", "word": "word", "text": "text.split()"}[of]
    calls = {"items": "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "word": "'strawberries'", "text": "'a b c d e f g h i j'"}[of]
    return Function(
        f"{ORDINALS[n]}_{kind.split()[0]}",
        of,
        f"return {taken}[{n - 1}]",
        (f"returns the {ORDINALS[n]} {kind}", f"gets the {ORDINALS[n]} {kind}"),
        (calls,),
    )


FAMILIES: tuple[Family, ...] = (
    every, every, ends, without_ends, compared, compared, removed, constant, constant, starting, longer, repeated,
    divisible, multiples, wrapped, counted, replaced, power, stepped, defaulted, item,
)  # fmt: skip


def drawn(random: Random) -> Function:
    return random.choice(FAMILIES)(random)
