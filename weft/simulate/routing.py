"""Routers for a simulated fleet: the real one, and simpler ones to compare it with.

The real router hears of a step when the step has ended, as it would over a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.engine.load import ReplicaLoad
from weft.fleet.router import Choice, FleetRouter
from weft.memory.journal import CacheChanges, Journal, Tier
from weft.memory.keys import Key
from weft.simulate.engine import SimulatedEngine
from weft.simulate.stepping import Simulated

# Cells whose hash decides the replica: enough to tell conversations with the same short instruction apart.
HASHED_CELLS = 16


class Routing(Protocol):
    """Chooses an engine for each request, by its place. `stepped` is called after each step of an engine."""

    def choose(self, sequence: Simulated, now: float) -> int: ...
    def stepped(self, place: int) -> None: ...
    def started(self, place: int, sequence: Simulated) -> None: ...
    def ended(self, place: int, sequence: Simulated) -> None: ...


class RoundRobin:
    """Sends requests to one engine after the other."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._count, self._cell = len(engines), engines[0].ledger.spec.cell
        self._next = 0

    def choose(self, sequence: Simulated, now: float) -> int:
        self._next += 1
        return (self._next - 1) % self._count

    def stepped(self, place: int) -> None:
        pass

    def started(self, place: int, sequence: Simulated) -> None:
        pass

    def ended(self, place: int, sequence: Simulated) -> None:
        pass


class Hashed(RoundRobin):
    """Sends requests that begin with the same cells to the same engine."""

    def choose(self, sequence: Simulated, now: float) -> int:
        cells = min(HASHED_CELLS, sequence.ask.prompt // self._cell)
        if not cells:
            return super().choose(sequence, now)
        return int.from_bytes(sequence.ask.keys[cells - 1], "little") % self._count


@dataclass(frozen=True, slots=True)
class News:
    """What a step changed, known when it has ended."""

    seconds: float
    changes: list[CacheChanges]
    load: ReplicaLoad
    started: list[int]
    ended: list[int]


class PageJournal(Journal):
    """Reports pages as if they were resume points, as the cache events of other engines do."""

    def note(self, tier: Tier, key: Key, tokens: int, held: bool, point: bool) -> None:
        if not point or not self.ledger.cache.point_bytes:
            super().note(tier, key, tokens, held, point=True)


class Mirrored:
    """The real router, fed by journals of this class."""

    def __init__(self, engines: Sequence[SimulatedEngine], journals: type[Journal] = Journal) -> None:
        self._now = 0.0
        self.router = FleetRouter(engines[0].ledger.spec.cell, clock=lambda: self._now)
        self._engines = engines
        # Routers of other engines send no hints.
        self._hints = journals is Journal
        self._journals = [journals(engine.ledger, epoch=place) for place, engine in enumerate(engines)]
        self._news: list[deque[News]] = [deque() for _ in engines]
        self._started: list[list[int]] = [[] for _ in engines]
        self._ended: list[list[int]] = [[] for _ in engines]
        self._numbers: dict[int, int] = {}
        self.last: Choice | None = None
        for place in range(len(engines)):
            self.router.add(str(place))
            self._journals[place].restart()
            self.stepped(place)

    def choose(self, sequence: Simulated, now: float) -> int:
        for place, news in enumerate(self._news):
            while news and news[0].seconds <= now:
                self._hear(str(place), news.popleft())
        self._now = now
        keys, prompt = sequence.ask.keys, sequence.ask.prompt
        self.last = self.router.choose(keys, prompt)[0]
        self._numbers[sequence.id] = self.router.assign(self.last, keys, prompt)
        if self._hints and self.last.junction is not None:
            sequence.request.boundaries = (*sequence.request.boundaries, self.last.junction)
        return int(self.last.replica)

    def _hear(self, name: str, news: News) -> None:
        self._now = news.seconds
        for changes in news.changes:
            assert self.router.apply(name, changes), "the simulation loses no changes"
        self.router.report(name, news.load)
        for number in news.started:
            self.router.started(number)
        for number in news.ended:
            self.router.ended(number)

    def stepped(self, place: int) -> None:
        engine, journal = self._engines[place], self._journals[place]
        changes = []
        while (batch := journal.take()) is not None:
            changes.append(batch)
        news = News(engine.now, changes, engine.load(), self._started[place], self._ended[place])
        self._news[place].append(news)
        self._started[place], self._ended[place] = [], []

    def started(self, place: int, sequence: Simulated) -> None:
        self._started[place].append(self._numbers[sequence.id])

    def ended(self, place: int, sequence: Simulated) -> None:
        self._ended[place].append(self._numbers.pop(sequence.id))


ROUTERS: dict[str, Callable[[Sequence[SimulatedEngine]], Routing]] = {
    "round-robin": RoundRobin,
    "hash": Hashed,
    "prefix": lambda engines: Mirrored(engines, PageJournal),
    "state": Mirrored,
}
