"""The choice of members by the router: feeds it with their news, and turns its choices into members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from weft.base.grid import CELL, floor_to_grid
from weft.base.tenants import Dropped
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews
from weft.engine.request import Request
from weft.fleet.choosing import LEAST_DISAGGREGATED
from weft.fleet.member import Member
from weft.fleet.router import Choice, FleetRouter
from weft.fleet.warming import DropsHeard, WantedPrefix, WantedPrefixes
from weft.memory.keys import Key, PrefixIdentity

# Costs that differ by less than a millisecond count as equal: then the number of open answers decides, which the
# router's prices, made of prompts alone, leave out.
COST_DIGITS = 3


@dataclass(slots=True)
class Ranked:
    """A request between its ranking and its end. `assigned` is its number at the router while a member has it."""

    keys: list[Key]
    choices: dict[str, Choice]
    assigned: int | None = None


def _order(choice: Choice, member: Member) -> tuple[float, int]:
    """Return the order of choices: the cheapest first, and of equals the one with fewer answers."""
    return round(choice.cost, COST_DIGITS), member.open


class RoutedChoice:
    """Implements `Chooser` with a `FleetRouter`."""

    def __init__(self, router: FleetRouter | None = None) -> None:
        self.router = router or FleetRouter(CELL)
        self._form: str | None = None
        self._wanted = WantedPrefixes()
        self._ranked: dict[int, Ranked] = {}
        self._listening: dict[str, Callable[[EngineNews], None]] = {}
        # Members that were asked to start over and have not done so yet, and whether there are none.
        self._starting_over: set[str] = set()
        self._all_started = asyncio.Event()
        self._all_started.set()
        self._drops = DropsHeard()
        self._on_drop: Callable[[Dropped], None] = self.forget

    def rank(self, number: int, request: Request, members: Sequence[Member]) -> list[Member]:
        prompt, params = request.known, request.params
        by_name = {member.name: member for member in members if member.name in self.router.replicas}
        keys = PrefixIdentity(CELL, request.salt, self._form).keys(prompt, decoded_from=len(request.prompt))
        limit = params.reads_from
        without = self.router.replicas.keys() - by_name.keys()
        choices = self.router.choose(keys, len(prompt), request.priority, limit, without)
        self._ranked[number] = Ranked(keys, {choice.replica: choice for choice in choices})
        ranked = sorted(choices, key=lambda choice: _order(choice, by_name[choice.replica]))
        return [by_name[choice.replica] for choice in ranked]

    def prefill(
        self, number: int, leg: int, request: Request, member: Member, prefillers: Sequence[Member]
    ) -> list[Member]:
        ranked = self._ranked[number]
        here, end = ranked.choices[member.name], floor_to_grid(len(request.prompt) - 1, CELL)
        by_name = {each.name: each for each in prefillers if each.name in self.router.replicas}
        if (
            request.answered is not None
            or len(request.prompt) - here.saved < LEAST_DISAGGREGATED
            or not by_name
            or member.name not in self.router.replicas
        ):
            return []
        without = self.router.replicas.keys() - by_name.keys()
        choices = self.router.choose(ranked.keys[: end // CELL], end + 1, request.priority, None, without)
        best = min(choices, key=lambda choice: choice.cost)
        if not self.router.pays_disaggregated(here, best, len(request.prompt)):
            return []
        self._ranked[leg] = Ranked(ranked.keys[: end // CELL], {choice.replica: choice for choice in choices})
        return [by_name[choice.replica] for choice in choices]

    def placed(self, number: int, request: Request, member: Member, disaggregated: bool = False) -> None:
        ranked = self._ranked[number]
        choice = ranked.choices[member.name]
        if member.name in self.router.replicas:
            # What is computed elsewhere is no work here.
            elsewhere = floor_to_grid(len(request.prompt) - 1, CELL) if disaggregated else 0
            expected = replace(choice, saved=max(choice.saved, elsewhere))
            ranked.assigned = self.router.assign(expected, ranked.keys, len(request.known), request.priority)
        if choice.saved and request.answered is None:
            self._wanted.note(ranked.keys[: choice.saved // CELL], request.prompt[: choice.saved], request.salt)

    def hinted(self, number: int, request: Request, member: Member) -> Request:
        """Add the position where the prompt parts from what other members have computed.

        An engine sees only its own pages. Without the hint it would keep a state there at the third prompt with this
        beginning, not at the second.
        """
        junction = self._ranked[number].choices[member.name].junction
        if junction is None or junction in request.boundaries:
            return request
        return msgspec.structs.replace(request, boundaries=(*request.boundaries, junction))

    def started(self, number: int) -> None:
        ranked = self._ranked.get(number)
        if ranked is not None and ranked.assigned is not None:
            self.router.started(ranked.assigned)

    def left(self, number: int) -> None:
        ranked = self._ranked.get(number)
        if ranked is not None and ranked.assigned is not None:
            self.router.ended(ranked.assigned)
            ranked.assigned = None

    def ended(self, number: int) -> None:
        self.left(number)
        self._ranked.pop(number, None)

    def wanted(self) -> list[WantedPrefix]:
        return self._wanted.best()

    async def hear_out(self) -> None:
        await self._all_started.wait()

    def forget(self, dropped: Dropped) -> None:
        self._wanted.forget(dropped)

    def on_drop(self, forget: Callable[[Dropped], None]) -> None:
        self._on_drop = forget

    # members --------------------------------------------------------------------------------------------------------

    def added(self, member: Member) -> None:
        settings = member.backend.info.settings
        self._form = settings["form"] if settings.get("exact") else None
        if member.name in self._listening:
            return
        self.router.add(member.name)
        self.router.report(member.name, ReplicaLoad(max_sequences=member.backend.info.max_sequences))
        self._listening[member.name] = partial(self._hear, member)
        self._start_over(member)

    def removed(self, member: Member) -> None:
        hear = self._listening.pop(member.name, None)
        if hear is not None:
            member.backend.unsubscribe(hear)
            self.router.remove(member.name)
            self._has_started(member.name)

    def _hear(self, member: Member, news: EngineNews) -> None:
        name, changes = member.name, news.changes
        if name not in self._listening:
            return
        self.router.report(name, news.load)
        if changes is None:
            return
        for dropped in self._drops.new(changes):
            self._on_drop(dropped)
        if changes.fresh:
            self._has_started(name)
        elif name in self._starting_over:
            # Of the stream before.
            return
        if not self.router.apply(name, changes):
            self._start_over(member)

    def _start_over(self, member: Member) -> None:
        self._starting_over.add(member.name)
        self._all_started.clear()
        member.backend.subscribe(self._listening[member.name])

    def _has_started(self, name: str) -> None:
        self._starting_over.discard(name)
        if not self._starting_over:
            self._all_started.set()
