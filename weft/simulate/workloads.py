"""Synthetic traffic with realistic shapes: conversations, agents, shared instructions, documents, searches.

Each workload is a function of a `Draw` that yields sessions in the order of their starts. Lengths follow published
statistics of such traffic: medians and tails, not single values. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

from weft.simulate.sessions import SimulatedSession
from weft.simulate.text import SimulatedRequest, Text, simulated_request

Turns = Iterator[tuple[float, SimulatedRequest]]
# Numbers of stretches that many sessions share; those of a session are lower.
SHARED = 1 << 60
PER_SESSION = 1 << 20


@dataclass(frozen=True, slots=True)
class Draw:
    """The amount of traffic, its rate (sessions per second; None: the workload's own), and its seed."""

    requests: int
    cell: int = 64
    seed: int = 0
    rate: float | None = None


class Dice:
    """The random choices of one session, and numbers for its texts."""

    def __init__(self, seed: int, session: int) -> None:
        self.random = Random((seed << 40) + session)
        self._numbers = count(session * PER_SESSION)

    def number(self) -> int:
        return next(self._numbers)

    def length(self, median: float, spread: float, most: int, least: int = 1) -> int:
        """Draw a log-normal length: half below the median, a third beyond `median * e**spread` or below its inverse."""
        drawn: float = median * 2.718281828 ** self.random.gauss(0, spread)
        return max(least, min(most, round(drawn)))

    def pause(self, mean: float) -> float:
        return self.random.expovariate(1 / mean)

    def turns(self, mean: float, most: int) -> int:
        """Draw a geometric number: after every turn the session ends with the same probability."""
        found = 1
        while found < most and self.random.random() > 1 / mean:
            found += 1
        return found


def zipf(choices: int, exponent: float) -> list[float]:
    """Return running sums of 1 / rank ** exponent, for `Random.choices`."""
    return list(accumulate(1 / rank**exponent for rank in range(1, choices + 1)))


def sessions(
    draw: Draw, rate: float, turns_each: float, turns: Callable[[Dice, int], Turns]
) -> Iterator[SimulatedSession]:
    """Yield as many sessions as make about the wanted number of requests; their starts are random (Poisson)."""
    random, start = Random(draw.seed), 0.0
    for index in range(max(1, round(draw.requests / turns_each))):
        yield SimulatedSession(start, turns(Dice(draw.seed, index), index))
        start += random.expovariate(draw.rate or rate)


def instructions(draw: Draw, choices: int, median: float, spread: float, most: int) -> list[int]:
    """Return the lengths of texts that sessions share; text `i` has the number SHARED + i."""
    dice = Dice(draw.seed, PER_SESSION - 1)
    return [dice.length(median, spread, most, least=64) for _ in range(choices)]


# conversations --------------------------------------------------------------------------------------------------------


def _conversation(draw: Draw, dice: Dice, turns: int, message: float, answer: float, pause: float) -> Turns:
    text = Text(draw.cell)
    for turn in range(turns):
        text.append(dice.number(), dice.length(message, 1.2, 4000))
        yield dice.pause(pause) if turn else 0.0, simulated_request(text, dice.number(), dice.length(answer, 0.9, 2000))


def lmsys(draw: Draw) -> Iterator[SimulatedSession]:
    """Chat with short messages, most conversations of one or two turns (like LMSys-Chat-1M)."""
    return sessions(draw, 4.0, 2.0, lambda dice, _: _conversation(draw, dice, dice.turns(2.0, 30), 35, 160, 60))


def sharegpt(draw: Draw) -> Iterator[SimulatedSession]:
    """Chat with longer messages and more turns (like ShareGPT)."""
    return sessions(draw, 2.0, 5.0, lambda dice, _: _conversation(draw, dice, dice.turns(5.0, 60), 120, 250, 60))


# agents ---------------------------------------------------------------------------------------------------------------


def coding(draw: Draw, compact_at: int | None = None) -> Iterator[SimulatedSession]:
    """A coding agent: one long instruction, then dozens of steps that only extend the context."""
    rules = 9000

    def turns(dice: Dice, _: int) -> Turns:
        text = Text(draw.cell, [(SHARED, rules), (dice.number(), dice.length(600, 0.8, 6000))])
        for turn in range(dice.turns(25.0, 120)):
            if turn:
                text.append(dice.number(), dice.length(500, 1.2, 12000))
            if compact_at is not None and text.length > compact_at:
                # A summary replaces the context.
                text = Text(draw.cell, [(SHARED, rules), (dice.number(), dice.length(1500, 0.4, 4000))])
            yield dice.pause(6.0) if turn else 0.0, simulated_request(text, dice.number(), dice.length(120, 0.9, 2000))

    return sessions(draw, 0.12, 24.0, turns)


def compacting(draw: Draw) -> Iterator[SimulatedSession]:
    """The coding agent, whose context is replaced by a summary when it exceeds 32,000 tokens."""
    return coding(draw, compact_at=32_000)


def tools(draw: Draw) -> Iterator[SimulatedSession]:
    """Short agents: one of forty sets of tools, a question, a few calls and their results."""
    lengths = instructions(draw, 40, 2200, 0.6, 8000)
    weights = zipf(len(lengths), 1.0)

    def turns(dice: Dice, _: int) -> Turns:
        which = dice.random.choices(range(len(lengths)), cum_weights=weights)[0]
        text = Text(draw.cell, [(SHARED + which, lengths[which])])
        for turn in range(dice.turns(4.0, 16)):
            text.append(dice.number(), dice.length(180, 1.0, 4000))
            yield dice.pause(3.0) if turn else 0.0, simulated_request(text, dice.number(), dice.length(70, 0.7, 600))

    return sessions(draw, 2.0, 3.9, turns)


# shared prefixes ------------------------------------------------------------------------------------------------------


def system_prompts(draw: Draw) -> Iterator[SimulatedSession]:
    """Five hundred system prompts of very different popularity (Zipf), each before a question that never returns."""
    lengths = instructions(draw, 500, 1300, 0.8, 12_000)
    weights = zipf(len(lengths), 1.0)

    def turns(dice: Dice, _: int) -> Turns:
        which = dice.random.choices(range(len(lengths)), cum_weights=weights)[0]
        text = Text(draw.cell, [(SHARED + which, lengths[which]), (dice.number(), dice.length(120, 1.0, 3000))])
        yield 0.0, simulated_request(text, dice.number(), dice.length(150, 0.8, 1000))

    return sessions(draw, 6.0, 1.0, turns)


def retrieval(draw: Draw) -> Iterator[SimulatedSession]:
    """Questions about long documents: a common instruction, one of 400 documents, one to three questions."""
    lengths = instructions(draw, 400, 9000, 0.7, 60_000)
    weights = zipf(len(lengths), 0.8)

    def turns(dice: Dice, _: int) -> Turns:
        which = dice.random.choices(range(len(lengths)), cum_weights=weights)[0]
        text = Text(draw.cell, [(SHARED, 300), (SHARED + 1 + which, lengths[which])])
        for turn in range(dice.turns(1.6, 3)):
            text.append(dice.number(), dice.length(40, 0.8, 500))
            yield dice.pause(40.0) if turn else 0.0, simulated_request(text, dice.number(), dice.length(120, 0.8, 1000))

    return sessions(draw, 1.0, 1.5, turns)


# searches -------------------------------------------------------------------------------------------------------------


def best_of_n(draw: Draw) -> Iterator[SimulatedSession]:
    """Eight answers to every question, requested at the same time; one is chosen and followed up once."""
    samples, start, random = 8, 0.0, Random(draw.seed)

    def one(dice: Dice, question: tuple[int, int], last: bool) -> Turns:
        text = Text(draw.cell, [question])
        yield 0.0, simulated_request(text, dice.number(), dice.length(300, 0.6, 1500))
        if last:
            text.append(dice.number(), dice.length(80, 0.8, 1000))
            yield 1.0, simulated_request(text, dice.number(), dice.length(100, 0.5, 500))

    for index in range(max(1, round(draw.requests / (samples + 1)))):
        dice = Dice(draw.seed, index * samples + samples)
        question = (SHARED + index, dice.length(500, 1.0, 8000))
        for sample in range(samples):
            own = Dice(draw.seed, index * samples + sample)
            yield SimulatedSession(start, one(own, question, last=sample == samples - 1))
        start += random.expovariate(draw.rate or 0.4)


def tree_search(draw: Draw) -> Iterator[SimulatedSession]:
    """A search over chains of thought: every node is continued three times, the better half continues, five levels."""

    def turns(dice: Dice, _: int) -> Turns:
        level = [Text(draw.cell, [(SHARED, 700), (dice.number(), dice.length(350, 0.8, 4000))])]
        for _ in range(5):
            grown = []
            for node in level:
                for _ in range(3):
                    branch = node.fork()
                    yield 0.05, simulated_request(branch, dice.number(), dice.length(110, 0.5, 600))
                    grown.append(branch)
            level = dice.random.sample(grown, max(1, min(4, len(grown) // 2)))

    return sessions(draw, 0.06, 39.0, turns)


# nothing to share -----------------------------------------------------------------------------------------------------


def unique(draw: Draw) -> Iterator[SimulatedSession]:
    """Prompts that share nothing with each other."""

    def turns(dice: Dice, _: int) -> Turns:
        text = Text(draw.cell, [(dice.number(), dice.length(1500, 1.0, 30_000))])
        yield 0.0, simulated_request(text, dice.number(), dice.length(150, 0.8, 1000))

    return sessions(draw, 3.0, 1.0, turns)


def scan(draw: Draw) -> Iterator[SimulatedSession]:
    """A warm set of instructions in steady use; in the middle third, a flood of long prompts that never return."""
    lengths = instructions(draw, 60, 2500, 0.5, 8000)
    total = max(3, draw.requests)
    random, start = Random(draw.seed), 0.0
    for index in range(total):
        flood = total // 3 <= index < 2 * total // 3 and index % 2 == 0
        yield SimulatedSession(start, _scan_turn(draw, Dice(draw.seed, index), flood, lengths))
        start += random.expovariate(draw.rate or 3.0)


def _scan_turn(draw: Draw, dice: Dice, flood: bool, lengths: list[int]) -> Turns:
    if flood:
        text = Text(draw.cell, [(dice.number(), dice.length(16_000, 0.4, 60_000))])
    else:
        which = dice.random.randrange(len(lengths))
        text = Text(draw.cell, [(SHARED + which, lengths[which]), (dice.number(), dice.length(120, 0.8, 2000))])
    yield 0.0, simulated_request(text, dice.number(), dice.length(100, 0.6, 600))


WORKLOADS: dict[str, Callable[[Draw], Iterator[SimulatedSession]]] = {
    "lmsys": lmsys,
    "sharegpt": sharegpt,
    "coding": coding,
    "compacting": compacting,
    "tools": tools,
    "system-prompts": system_prompts,
    "retrieval": retrieval,
    "best-of-n": best_of_n,
    "tree-search": tree_search,
    "unique": unique,
    "scan": scan,
}
