"""The traffic of `weft bench`: sessions of one or more turns, made from a seed alone.

A session's turns follow each other; sessions are independent. No text is read from files: prompts are drawn token by
token (ids, or common short words), so that the same options always send the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from weft.base.errors import OptionError
from weft.cli.bench.options import BenchOptions

# Each word, with the space before it, is one token in nearly every tokenizer.
TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long each just state those
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One turn: numbers that become ids or words, and the number of tokens to generate."""

    drawn: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchSession:
    """Turns that build on each other. `due` is the start of the first in seconds; None: by rate, or at once."""

    turns: tuple[BenchTurn, ...]
    due: float | None = None


def draw(name: str, length: int, below: int) -> tuple[int, ...]:
    """Return the numbers that belong to a name; the same name always gives the same numbers.

    >>> draw("a", 3, 256) == draw("a", 4, 256)[:3]
    True
    """
    chance = random.Random(name)
    return tuple(chance.choices(range(below), k=length))


def words(drawn: Sequence[int]) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in drawn)


def _spread(options: BenchOptions, length: int, chance: random.Random) -> int:
    """Return a random length, uniform between `length` times (1 - spread) and (1 + spread)."""
    return max(1, round(length * chance.uniform(1 - options.spread, 1 + options.spread)))


def random_prompts(options: BenchOptions) -> Iterator[BenchSession]:
    """Yield prompts that share nothing."""
    chance = random.Random(options.seed)
    for number in range(options.prompts):
        length, answer = (_spread(options, each, chance) for each in (options.input_length, options.output_length))
        yield BenchSession((BenchTurn(draw(f"{options.seed} random {number}", length, options.vocabulary), answer),))


def shared_prefixes(options: BenchOptions) -> Iterator[BenchSession]:
    """Yield prompts in groups with a common prefix, shuffled: system prompts with a question each."""
    return _prefixed(options, "prefix", options.groups, options.prefix_length)


def long_documents(options: BenchOptions) -> Iterator[BenchSession]:
    """Yield several questions about each of a few long documents, shuffled."""
    return _prefixed(options, "document", options.groups, options.document_length)


def _prefixed(options: BenchOptions, kind: str, groups: int, length: int) -> Iterator[BenchSession]:
    chance = random.Random(options.seed)
    order = [number % groups for number in range(options.prompts)]
    chance.shuffle(order)
    for number, group in enumerate(order):
        prefix = draw(f"{options.seed} {kind} {group}", length, options.vocabulary)
        asked = _spread(options, options.input_length, chance)
        question = draw(f"{options.seed} question {number}", asked, options.vocabulary)
        yield BenchSession((BenchTurn(prefix + question, _spread(options, options.output_length, chance)),))


def multi_turn(options: BenchOptions) -> Iterator[BenchSession]:
    """Yield conversations: every turn sends the messages so far, with the server's answers."""
    chance = random.Random(options.seed)
    for number in range(options.prompts):
        turns = []
        for turn in range(options.turns):
            length, answer = (_spread(options, each, chance) for each in (options.input_length, options.output_length))
            turns.append(BenchTurn(draw(f"{options.seed} turn {number} {turn}", length, options.vocabulary), answer))
        yield BenchSession(tuple(turns))


def traced(options: BenchOptions) -> Iterator[BenchSession]:
    """Yield the requests of a trace in Mooncake's format: one JSON object per line with timestamp (ms), input_length,
    output_length and hash_ids, each standing for a block of 512 tokens. Equal ids become equal tokens."""
    if options.trace is None:
        raise OptionError("workload trace needs a file; pass --trace FILE")
    block = max(1, round(512 * options.trace_scale))
    for number, line in enumerate(_lines(options.trace, options.prompts), start=1):
        try:
            entry = json.loads(line)
            length, answer = (
                max(1, round(entry[f"{side}_length"] * options.trace_scale)) for side in ("input", "output")
            )
            due, blocks = float(entry["timestamp"]) / 1000, [str(each) for each in entry["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{options.trace}, line {number}: no request in Mooncake's format: {error!r}") from None
        missing = [f"{number} rest"] * (-(-length // block) - len(blocks))
        drawn = chain.from_iterable(draw(f"block {name}", block, options.vocabulary) for name in [*blocks, *missing])
        yield BenchSession((BenchTurn(tuple(drawn)[:length], answer),), due=due / options.trace_speed)


def _lines(path: str, count: int) -> Iterator[str]:
    try:
        with Path(path).open() as file:
            for line, _ in zip((line for line in file if line.strip()), range(count)):
                yield line
    except OSError as error:
        raise OptionError(f"cannot read trace {path}: {error.strerror}") from None


WORKLOADS: dict[str, Callable[[BenchOptions], Iterator[BenchSession]]] = {
    "random": random_prompts,
    "generated-shared-prefix": shared_prefixes,
    "multi-turn": multi_turn,
    "long-document": long_documents,
    "trace": traced,
}
