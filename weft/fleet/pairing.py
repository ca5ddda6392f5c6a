"""Prompts that are computed by one member and answered by another: the leg over a prefill engine, before the answer.

Whatever happens on it, the request goes on to the member that answers it, which computes what has not arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError
from weft.base.grid import CELL, floor_to_grid
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination
from weft.engine.events import FinishReason
from weft.engine.request import Request
from weft.fleet.choosing import Chooser
from weft.fleet.member import LEFT, Member

log = logging.getLogger("weft")

# Prefill engines that a prompt is tried on.
MOST_LEGS = 2
LOCAL_HOST = "127.0.0.1"


def role_of(member: Member) -> str:
    return str(member.backend.info.settings.get("role", "both"))


def answers_requests(member: Member) -> bool:
    return role_of(member) != "prefill"


def prefills_for_others(member: Member) -> bool:
    return role_of(member) == "prefill"


def destination_of(member: Member) -> Destination | None:
    """Return where a member receives prefixes, if it does."""
    door = member.backend.info.settings.get("transfer")
    if not isinstance(door, dict):
        return None
    host = door.get("host") or getattr(member.backend, "host", LOCAL_HOST)
    further = tuple(int(port) for port in door.get("further_ports", ()))
    return Destination(str(host), int(door["port"]), bool(door["secure"]), further)


def ranks_of(member: Member) -> int:
    return int(member.backend.info.settings.get("tensor_parallel", 1))


def revisions_of(member: Member) -> str:
    """Return the numbers of what a member's code computes; an earlier version of Weft reports none."""
    return str(member.backend.info.settings.get("revisions") or "an earlier version")


class PrefillPool:
    """Finds prefill engines whose prefixes fit a member. A mismatch is logged once for each pair of engines."""

    def __init__(self) -> None:
        self._refused: set[tuple[str, object, str, object]] = set()

    def fitting(self, members: list[Member], member: Member) -> list[Member]:
        """Return the prefill engines that take requests, and whose units mean the same to `member`.

        They have as many tensor-parallel ranks, and their code computes the same.
        """
        found = (each for each in members if each.takes_requests and prefills_for_others(each))
        return [each for each in found if self._fits(each, member)]

    def _fits(self, prefiller: Member, member: Member) -> bool:
        same_ranks = self._agree(
            (prefiller.name, ranks_of(prefiller), member.name, ranks_of(member)),
            "prefill engine %s has --tensor-parallel %s and cannot send prefixes to %s, which has %s; start both with "
            "the same number",
        )
        return same_ranks and self._agree(
            (prefiller.name, revisions_of(prefiller), member.name, revisions_of(member)),
            "prefill engine %s computes %s and cannot send prefixes to %s, which computes %s; use one version of Weft",
        )

    def _agree(self, pair: tuple[str, object, str, object], warning: str) -> bool:
        """Return whether two engines have the same; if not, log it once."""
        if pair[1] != pair[3] and pair not in self._refused:
            self._refused.add(pair)
            log.warning(warning, *pair)
        return pair[1] == pair[3]


def prefix_request(request: Request, destination: Destination) -> Request:
    """Return the request to a prefill engine: the prompt up to the last position that a request can resume at."""
    end = floor_to_grid(len(request.prompt) - 1, CELL)
    return Request(
        np.ascontiguousarray(request.prompt[:end]),
        SamplingParams(max_tokens=0, temperature=0.0),
        salt=request.salt,
        priority=request.priority,
        snapshots=tuple(position for position in request.snapshots if position <= end),
        boundaries=tuple(position for position in request.boundaries if position <= end),
        send_to=destination,
    )


class PrefillLeg:
    """A prompt at a prefill engine, or at a second one if the first fails. `number` is its own at the chooser.

    `failed` is called with a member that died or fell silent with it.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        destination: Destination,
        members: list[Member],
        chooser: Chooser,
        failed: Callable[[Member], None],
    ) -> None:
        self.number = number
        self.request = prefix_request(request, destination)
        self._members = members[:MOST_LEGS]
        self._chooser = chooser
        self._failed = failed
        self._member: Member | None = None
        self._inner: OutputStream | None = None
        self._aborted = False
        # Whether the whole prefix has arrived.
        self.sent = False

    async def begin(self) -> bool:
        """Submit the prompt to the next member that accepts it; return whether one did."""
        try:
            while self._members and not self._aborted:
                member = self._members.pop(0)
                if member.takes_requests and await self._submit_to(member):
                    return True
        except BaseException:
            self._chooser.ended(self.number)
            raise
        self._chooser.ended(self.number)
        return False

    async def _submit_to(self, member: Member) -> bool:
        self._chooser.placed(self.number, self.request, member)
        try:
            inner = await member.submit(self._chooser.hinted(self.number, self.request, member))
        except EngineStopped:
            self._chooser.left(self.number)
            self._failed(member)
            return False
        except RequestError:
            # The member that answers judges the request itself.
            self._chooser.left(self.number)
            return False
        self._member, self._inner = member, inner
        member.enter(self)
        if self._aborted or not member.takes_requests:
            self.abandon()
        return True

    async def wait(self) -> None:
        """Wait until the prompt was sent, or will not be."""
        while self._inner is not None and self._member is not None:
            inner, member = self._inner, self._member
            try:
                async for outputs in inner:
                    self._chooser.started(self.number)
                    self.sent = outputs[-1].finish is FinishReason.LENGTH
            except EngineStopped:
                self._leave()
                if self._aborted:
                    self._chooser.ended(self.number)
                    return
                self._chooser.left(self.number)
                self._failed(member)
                await self.begin()
            else:
                self._leave()
                self._chooser.ended(self.number)

    def abandon(self) -> None:
        """Give up the member: it does not respond, or no more requests go there."""
        if self._member is not None and self._inner is not None:
            self._member.backend.abort(self._inner)
            self._inner.fail(LEFT)

    def abort(self) -> None:
        """End the leg, because the caller or the member that would answer has gone."""
        self._aborted = True
        self.abandon()
        self._leave()
        self._chooser.ended(self.number)

    def _leave(self) -> None:
        member, self._member, self._inner = self._member, None, None
        if member is not None:
            member.leave(self)
