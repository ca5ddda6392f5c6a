"""Small Python programs: functions asked for, explained, called, renamed; classes, snippets and words of Python."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from weft_training.made.asking import article, asked, capital, table
from weft_training.made.exchange import Exchange, Maker

OTHER_NAMES = ("compute", "calculate", "helper", "my_function", "run", "f", "process", "solve", "do_it", "apply")
UNCOUNTED = (
    "None", "self", "print", "len", "input", "recursion", "inheritance", "indentation", "break", "continue", "else",
)  # fmt: skip
# What a sign in the code means, for an explanation; the first that fits is told.
MEANINGS = (
    (r"\S for ", "It goes through the values in one line with a comprehension."),
    (r"\bfor ", "It uses a for loop."),
    (r"\bwhile ", "It uses a while loop."),
    (r"\[::-1\]", "The slice [::-1] goes through the value backwards."),
    (r"[\w)]\[-1\]", "The index -1 stands for the last one."),
    (r"[\w)]\[0\]", "The index 0 stands for the first one."),
    (r"\bsorted\(", "It uses sorted(), which returns a sorted list."),
    (r"\bset\(", "It uses a set, which holds each value once."),
    (r"\bsum\(", "It uses sum(), which adds up numbers."),
    (r"\bmax\(", "It uses max(), which finds the largest value."),
    (r"\bmin\(", "It uses min(), which finds the smallest value."),
    (r"\.split\(", "It uses split(), which cuts a text into parts."),
    (r"\.join\(", "It uses join(), which puts texts together."),
    (r"\.replace\(", "It uses replace(), which exchanges parts of a text."),
    (r"\blen\(", "It uses len(), which returns the length."),
    (r"\bif ", "It uses if to decide what to return."),
    (r" // ", "The sign // divides without a remainder."),
    (r" % ", "The sign % gives the remainder of a division."),
    (r" \*\* ", "The sign ** means to the power of."),
    (r" \* ", "The sign * multiplies a number or repeats a value."),
    (r" \+ ", "The sign + adds numbers or puts values together."),
    (r" - ", "The sign - subtracts."),
    (r" / ", "The sign / divides."),
    (r" in ", "The word in tells whether one value is part of another."),
)


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    of: str  # its parameters
    body: str
    does: tuple[str, ...]  # goes on after "a function that"
    calls: tuple[str, ...]  # arguments to show what it returns

    def code(self, docstring: bool = False) -> str:
        """
        >>> print(Function("twice", "x", "return 2 * x", ("doubles",), ("2",)).code(docstring=True))
        def twice(x):
            \"\"\"Doubles.\"\"\"
            return 2 * x
        """
        told = f'"""{capital(self.does[0])}."""\n' if docstring else ""
        return f"def {self.name}({self.of}):\n" + textwrap.indent(told + self.body, "    ")

    def named(self, name: str) -> Function:
        """The same under another name, where it calls itself as well."""
        return Function(name, self.of, re.sub(rf"\b{self.name}\b", name, self.body), self.does, self.calls)


@cache
def functions() -> tuple[Function, ...]:
    entries = table("functions")
    return tuple(
        Function(name, entry["of"], entry["body"].strip("\n"), tuple(entry["does"]), tuple(entry["calls"]))
        for name, entry in entries.items()
    )


@cache
def result(code: str, call: str) -> str:
    """What a call gives back, as Python writes it.

    >>> result("def double(x):\\n    return 2 * x", "double(4)")
    '8'
    """
    names: dict[str, Any] = {}
    exec(compile(code, "shown", "exec"), names)
    return repr(eval(call, names))


def fenced(code: str) -> str:
    return f"```python\n{code.strip(chr(10))}\n```"


def plain(does: str) -> str:
    """What a function does, as what one does.

    >>> plain("adds two numbers"), plain("multiplies all"), plain("searches a list"), plain("is a stack")
    ('add two numbers', 'multiply all', 'search a list', 'be a stack')
    """
    verb, _, rest = does.partition(" ")
    if verb.endswith("ies"):
        verb = verb[:-3] + "y"
    elif verb.endswith(("shes", "ches", "xes", "sses")):
        verb = verb[:-2]
    else:
        verb = {"is": "be", "does": "do", "has": "have"}.get(verb, verb[:-1])
    return f"{verb} {rest}" if rest else verb


def requested(random: Random, does: str) -> str:
    do = plain(does)
    return asked(
        random, f"Write a Python function that {does}.", f"Write a Python function that {does}.",
        f"Write a function that {does}.", f"Can you write a Python function that {does}?",
        f"Can you write a function to {do}?", f"How do I {do} in Python?", f"python function to {do}",
        f"Show me a Python function that {does}.", f"I need a function that {does}.",
        f"Please write a small Python function which {does}.", f"Give me a Python function to {do}.",
        f"How can I {do} in Python?", f"Write Python code that {does}.", f"Could you write a function that {does}?",
        f"Write me a short Python function to {do}.", f"I want to {do} in Python.", f"Python: {do}.",
        f"Make a Python function that {does}.", f"Define a function that {does}.",
    )  # fmt: skip


def shown(function: Function, arguments: str) -> str:
    """
    >>> shown(Function("twice", "x", "return 2 * x", ("doubles a number",), ("2",)), "4")
    'twice(4) returns 8.'
    """
    call = f"{function.name}({arguments})"
    return f"{call} returns {result(function.code(), call)}."


def answered(random: Random, function: Function) -> str:
    code = fenced(function.code())
    does, example = random.choice(function.does), shown(function, random.choice(function.calls))
    return random.choice(
        [code, code, code, f"Here it is:\n\n{code}", f"{code}\n\nThis function {does}.", f"Sure!\n\n{code}",
         f"{code}\n\nFor example, {example}", f"Here is a function that {does}:\n\n{code}",
         f"{code}\n\nIt {does}. For example, {example}"]
    )  # fmt: skip


def explained(random: Random, function: Function) -> str:
    recursive = f"{function.name}(" in function.body
    how = [text for sign, text in MEANINGS if re.search(sign, function.body)][:1]
    how = ["It calls itself with a smaller value."] if recursive else how
    takes = f"It takes {_and(function.of)}." if function.of else "It takes nothing."
    first = f"The function {function.name} {random.choice(function.does)}."
    return " ".join([first, takes, *how] if random.random() < 0.7 else [first, *how])


def _and(parameters: str) -> str:
    *others, last = parameters.split(", ")
    return f"{', '.join(others)} and {last}" if others else last


def in_a_list(function: Function) -> Function:
    """The function for every item of a list."""
    body = f"return [{function.name}(item) for item in items]"
    return Function(f"{function.name}_all", "items", body, (f"{function.does[0]} for every item",), ())


def followed(random: Random, function: Function) -> tuple[Exchange, Function | None]:
    """Something asked about a function that was just shown; and the function as it is now, if one can still ask."""
    kind = random.choice(["explain", "explain", "call", "call", "docstring", "rename", "list", "name"])
    if kind == "list" and function.of.isidentifier() and function.of not in ("items", "numbers", "words"):
        said = asked(random, "Now for lists.", "Now for a list.", "Can you do that for every item of a list?")
        return (said, fenced(in_a_list(function).code()) + "\n\nIt calls the function for every item."), None
    if kind == "docstring":
        said = asked(random, "Can you add a docstring?", "Add a docstring, please.", "Now with a docstring.")
        return (said, fenced(function.code(docstring=True))), function
    if kind == "rename":
        name = random.choice([each for each in OTHER_NAMES if each != function.name])
        said = asked(random, f"Can you rename it to {name}?", f"Call it {name}, please.", f"Rename it to {name}.")
        return (said, fenced(function.named(name).code())), function.named(name)
    if kind == "name":
        said = asked(random, "What is the function called?", "What is its name?")
        return (said, f"It is called {function.name}."), function
    if kind == "call":
        return tried(random, function), function
    said = asked(random, "Can you explain it?", "How does it work?", "What does it do?", "Explain it, please.",
                 "Can you explain the code?")  # fmt: skip
    return (said, explained(random, function)), function


def tried(random: Random, function: Function) -> Exchange:
    """What the function returns, or how it is called."""
    arguments = random.choice(function.calls)
    call = f"{function.name}({arguments})"
    returned = result(function.code(), call)
    if arguments and random.random() < 0.6:
        said = asked(random, f"What does it return for {arguments}?", f"What is {call}?", f"And for {arguments}?")
        return said, random.choice([shown(function, arguments), f"It returns {returned}."])
    said = asked(random, "Can you give me an example?", "How do I call it?", "How do I use it?", "Show me an example.")
    return said, f"You can call it like this:\n\n{fenced(f'print({call})')}\n\nThe result is {returned}."


def thanked(random: Random) -> Exchange:
    said = random.choice(["Thanks!", "Thank you!", "Great, thanks.", "Perfect, thank you."])
    return said, random.choice(["You are welcome!", "You're welcome!", "Happy to help!"])


def asked_for(random: Random, function: Function) -> list[Exchange]:
    exchanges = [(requested(random, random.choice(function.does)), answered(random, function))]
    now: Function | None = function
    while now and random.random() < 0.3 and len(exchanges) < 3:
        exchange, now = followed(random, now)
        exchanges.append(exchange)
    if random.random() < 0.08:
        exchanges.append(thanked(random))
    return exchanges


def function(random: Random) -> list[Exchange]:
    return asked_for(random, random.choice(functions()))


def family(random: Random) -> list[Exchange]:
    """A function with a constant in its request and in its code."""
    from weft_training.made.families import drawn

    return asked_for(random, drawn(random))


def class_of_objects(random: Random) -> list[Exchange]:
    entry = random.choice(table("python")["class"])
    does, code = random.choice(entry["does"]), entry["code"].strip("\n")
    said = asked(
        random,
        f"Write a Python class that {does}.",
        f"Can you write a class that {does}?",
        f"I need a class that {does}.",
        f"Show me a small Python class that {does}.",
    )
    returned = f"{entry['shown']} gives {result(code, entry['shown'])}."
    exchanges = [
        (
            said,
            random.choice(
                [fenced(code), f"Here it is:\n\n{fenced(code)}", f"{fenced(code)}\n\nFor example, {returned}"]
            ),
        )
    ]
    if random.random() < 0.3:
        exchanges.append((asked(random, "Can you give me an example?", "How do I use it?"), f"For example, {returned}"))
    return exchanges


def snippet(random: Random) -> list[Exchange]:
    entry = random.choice(table("python")["snippet"])
    do, code = random.choice(entry["ask"]), fenced(entry["code"])
    said = asked(
        random,
        f"How do I {do} in Python?",
        f"How can I {do} in Python?",
        f"Show me how to {do} in Python.",
        f"Python: {do}.",
        f"Can you show me how to {do}?",
        f"How do you {do} in Python?",
        f"python code to {do}",
    )
    exchanges = [(said, random.choice([code, code, f"Like this:\n\n{code}", f"You can {do} like this:\n\n{code}"]))]
    if random.random() < 0.15:
        exchanges.append(thanked(random))
    return exchanges


def word(random: Random) -> list[Exchange]:
    """A word of Python, and perhaps an example of it."""
    term, (told, code) = random.choice(list(table("python")["words"].items()))
    one = term if term in UNCOUNTED else article(term)
    said = asked(random, f"What is {one} in Python?", f"What is {one} in Python?", f"Tell me about {one} in Python.",
                 f"Explain what {one} is in Python.", f"What does {term} mean in Python?",
                 f"Can you explain {one} in Python?")  # fmt: skip
    if random.random() < 0.4:
        more = asked(random, "Can you give me an example?", "Show me an example.", "What does that look like?",
                     "An example, please.")  # fmt: skip
        return [(said, told), (more, random.choice([fenced(code), f"Here is an example:\n\n{fenced(code)}"]))]
    return [(said, told if random.random() < 0.7 else f"{told} For example:\n\n{fenced(code)}")]


MAKERS: dict[Maker, float] = {function: 4.5, family: 3, class_of_objects: 0.4, snippet: 1, word: 1.1}
