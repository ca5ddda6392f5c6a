"""Lets a new member compute the prefixes that are wanted most, before it takes requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from weft.base.errors import WeftError
from weft.base.tenants import Dropped
from weft.engine.request import Request
from weft.fleet.choosing import Chooser
from weft.fleet.member import Member
from weft.fleet.warming import WantedPrefix

log = logging.getLogger("weft")

# Time that a new engine has to compute wanted prefixes.
WARM_SECONDS = 60.0
# Time that it has to drop what was dropped meanwhile.
DROP_SECONDS = 5.0


class WarmUp:
    """`others_serve` returns whether any member takes requests: if none does, they must not wait."""

    def __init__(self, chooser: Chooser, others_serve: Callable[[], bool]) -> None:
        self._chooser = chooser
        self._others_serve = others_serve
        # What was dropped meanwhile, for each member that is being warmed.
        self._dropped: dict[Member, list[Dropped]] = {}
        chooser.on_drop(self.forget)

    def forget(self, dropped: Dropped) -> None:
        """Forget prefixes that an operator dropped, and compute none of them."""
        self._chooser.forget(dropped)
        for heard in self._dropped.values():
            if dropped not in heard:
                heard.append(dropped)

    async def run(self, member: Member) -> None:
        computed: list[WantedPrefix] = []
        dropped = self._dropped[member] = []
        # The member itself may report drops.
        self._chooser.added(member)
        try:
            with suppress(TimeoutError, WeftError):
                async with asyncio.timeout(WARM_SECONDS):
                    await self._compute_wanted(member, computed, dropped)
            log.info("replica %s has computed %d wanted prefixes", member.name, len(computed))
            # What was computed must not outlive a drop that did not reach this member, or came before it was done.
            for key in {key for each in dropped for prefix in computed if (key := prefix.cut_by(each)) is not None}:
                with suppress(TimeoutError, WeftError):
                    await asyncio.wait_for(member.backend.drop(None, key), DROP_SECONDS)
        finally:
            del self._dropped[member]

    async def _compute_wanted(self, member: Member, computed: list[WantedPrefix], dropped: list[Dropped]) -> None:
        if self._chooser.wanted():
            await self._chooser.hear_out()
        for prefix in self._chooser.wanted():
            if not self._others_serve():
                break
            if all(prefix.cut_by(each) is None for each in dropped):
                computed.append(prefix)
                await self._compute(member, prefix.request())

    async def _compute(self, member: Member, request: Request) -> None:
        stream = await member.backend.submit(request)
        try:
            async for _ in stream:
                pass
        except asyncio.CancelledError:
            member.backend.abort(stream)
            raise
