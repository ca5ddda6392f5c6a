"""When requests arrive: sessions in the order of their starts; each turn comes some time after the last answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from weft.simulate.text import SimulatedRequest


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    """`turns` yields (seconds after the last answer, request), one after the other."""

    start: float
    turns: Iterator[tuple[float, SimulatedRequest]]


class Arrivals:
    """Requests in the order of their times; sessions are opened when their time has come, not before."""

    def __init__(self, sessions: Iterator[SimulatedSession]) -> None:
        self._sessions = sessions
        self._next = next(sessions, None)
        self._due: list[tuple[float, int, SimulatedRequest, SimulatedSession]] = []
        self._count = 0

    def next_time(self) -> float | None:
        """Return when the next request arrives, as far as is known: running answers may bring earlier ones."""
        self._open()
        return self._due[0][0] if self._due else None

    def pop(self) -> tuple[float, SimulatedRequest, SimulatedSession]:
        self._open()
        time, _, found, session = heappop(self._due)
        return time, found, session

    def go_on(self, session: SimulatedSession, now: float) -> None:
        """Schedule the session's next turn, if it has one, after its last answer."""
        turn = next(session.turns, None)
        if turn is not None:
            self._count += 1
            heappush(self._due, (now + turn[0], self._count, turn[1], session))

    def _open(self) -> None:
        while self._next is not None and (not self._due or self._next.start <= self._due[0][0]):
            self.go_on(self._next, self._next.start)
            self._next = next(self._sessions, None)
