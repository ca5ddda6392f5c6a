"""Which member gets a request: the interface of the choice, and the simplest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from weft.base.grid import CELL
from weft.base.tenants import Dropped
from weft.engine.request import Request
from weft.fleet.member import Member
from weft.fleet.warming import WantedPrefix

# With fewer tokens to compute, a way over another engine cannot pay: a cell is computed where the answer is anyway.
LEAST_DISAGGREGATED = 2 * CELL


class Chooser(Protocol):
    """Ranks members for a request, which has a number. Runs in the event loop's thread."""

    def rank(self, number: int, request: Request, members: Sequence[Member]) -> list[Member]:
        """Return the members that may get the request, the best first."""
        ...

    def prefill(
        self, number: int, leg: int, request: Request, member: Member, prefillers: Sequence[Member]
    ) -> list[Member]:
        """Return who may compute the prompt of a ranked request that `member` will answer, the best first.

        None of them if `member` should compute it. `leg` is the number of the prompt's way over one of them.
        """
        ...

    def placed(self, number: int, request: Request, member: Member, disaggregated: bool = False) -> None:
        """Note that a request is about to be sent to a member; `disaggregated`: a prefill engine gets its prompt."""
        ...

    def hinted(self, number: int, request: Request, member: Member) -> Request:
        """Return a ranked request as the member should get it: it may name positions worth keeping."""
        ...

    def started(self, number: int) -> None:
        """Note the first output of a request."""
        ...

    def left(self, number: int) -> None:
        """Note that the member did not accept the request, or gave it up; another one may get it."""
        ...

    def ended(self, number: int) -> None:
        """Forget a request. Unknown numbers are ignored."""
        ...

    def added(self, member: Member) -> None:
        """Note that a member is warmed, or takes requests from now on. Known members are ignored."""
        ...

    def removed(self, member: Member) -> None:
        """Forget a member that takes no more requests. Unknown members are ignored."""
        ...

    def wanted(self) -> list[WantedPrefix]:
        """Return the prefixes that a new member should compute before it serves."""
        ...

    async def hear_out(self) -> None:
        """Wait until all members have reported what was dropped while they were away."""
        ...

    def forget(self, dropped: Dropped) -> None:
        """Forget wanted prompts: an operator drops them."""
        ...

    def on_drop(self, forget: Callable[[Dropped], None]) -> None:
        """Call `forget` with drops that members report."""
        ...


class LeastOpen:
    """Prefers the member with the fewest open requests; of equals, each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def rank(self, number: int, request: Request, members: Sequence[Member]) -> list[Member]:
        self._turn += 1
        first = self._turn % len(members) if members else 0
        return sorted([*members[first:], *members[:first]], key=lambda member: member.open)

    def prefill(
        self, number: int, leg: int, request: Request, member: Member, prefillers: Sequence[Member]
    ) -> list[Member]:
        return sorted(prefillers, key=lambda each: each.open) if len(request.prompt) > LEAST_DISAGGREGATED else []

    def placed(self, number: int, request: Request, member: Member, disaggregated: bool = False) -> None:
        pass

    def hinted(self, number: int, request: Request, member: Member) -> Request:
        return request

    def started(self, number: int) -> None:
        pass

    def left(self, number: int) -> None:
        pass

    def ended(self, number: int) -> None:
        pass

    def added(self, member: Member) -> None:
        pass

    def removed(self, member: Member) -> None:
        pass

    def wanted(self) -> list[WantedPrefix]:
        return []

    async def hear_out(self) -> None:
        pass

    def forget(self, dropped: Dropped) -> None:
        pass

    def on_drop(self, forget: Callable[[Dropped], None]) -> None:
        pass
