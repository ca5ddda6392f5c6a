"""Questions to all members of a fleet: their numbers, reports of their caches, flushes and drops, as one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from weft.base.errors import EngineStopped
from weft.base.tenants import Dropped
from weft.fleet.member import Member, MemberState
from weft.fleet.pairing import answers_requests, prefills_for_others, role_of
from weft.fleet.totals import merged_reports, summed

# Time that an ejected member has for a sign of life, and any member for its numbers.
PROBE_SECONDS = 5.0
NONE_AVAILABLE = "no replica is available"


class MemberQuestions:
    """`members` is the fleet's own list. `closed` returns why the fleet answers nothing; None: it does.

    `forget` makes the router forget prompts that are dropped.
    """

    def __init__(
        self, members: list[Member], closed: Callable[[], str | None], forget: Callable[[Dropped], None]
    ) -> None:
        self._members = members
        self._closed = closed
        self._forget = forget

    async def flush(self) -> int:
        """Flush all members; return how many cached tokens are left."""
        return sum((await self._ask(lambda member: member.backend.flush())).values())

    async def drop(self, dropped: Dropped) -> dict[str, Any]:
        """Drop prefixes from all members; raises if one does not respond."""
        tenant, prefix = dropped.tenant, dropped.prefix
        # A member that is being warmed must not bring back what is dropped here.
        self._forget(dropped)
        found: dict[str, Any] = {}
        # Prefill engines first: what they send after their drop would come back to an engine that dropped before.
        for role in (prefills_for_others, answers_requests):
            asked = [member for member in self._members if member.backend.healthy and role(member)]
            found |= await self._answers(asked, lambda member: member.backend.drop(tenant, prefix), _while_alive)
        if not found:
            raise EngineStopped(NONE_AVAILABLE)
        # Requests that were placed meanwhile may have named a dropped prefix.
        self._forget(dropped)
        silent = [member.name for member in self._members if member.name not in found]
        if silent:
            raise EngineStopped(f"dropped, but not from replicas that do not respond: {', '.join(silent)}; try again")
        return summed(list(found.values())) | {"erased": all(each.get("erased", True) for each in found.values())}

    async def stats(self) -> dict[str, Any]:
        """Return the sums of the members' numbers, and the facts about each member."""
        found = await self._ask(lambda member: member.backend.stats())
        return summed(list(found.values())) | {"replicas": {member.name: _facts(member) for member in self._members}}

    async def cache_report(self, limit: int) -> dict[str, Any]:
        return merged_reports(await self._ask(lambda member: member.backend.cache_report(limit)), limit)

    async def request_facts(self, name: str) -> list[dict[str, Any]]:
        found = await self._ask(lambda member: member.backend.request_facts(name))
        return [facts for each in found.values() for facts in each]

    async def _ask(self, question: Callable[[Member], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Return the answers of the members that give one soon, by name."""
        found = await self._answers(self._members, question, _soon)
        if not found:
            raise EngineStopped(NONE_AVAILABLE)
        return found

    async def _answers(
        self,
        members: Sequence[Member],
        question: Callable[[Member], Coroutine[Any, Any, Any]],
        wait: Callable[[Member, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]],
    ) -> dict[str, Any]:
        closed = self._closed()
        if closed is not None:
            raise EngineStopped(closed)
        asked = [member for member in members if member.backend.healthy]
        answers = await asyncio.gather(*(wait(member, question(member)) for member in asked), return_exceptions=True)
        pairs = zip(asked, answers, strict=True)
        return {member.name: answer for member, answer in pairs if not isinstance(answer, BaseException)}


async def _soon(member: Member, answer: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(answer, PROBE_SECONDS)


async def _while_alive(member: Member, answer: Coroutine[Any, Any, Any]) -> Any:
    """Return an answer that may take minutes, as long as its member answers other questions meanwhile."""
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({task}, timeout=PROBE_SECONDS))[0]:
            await asyncio.wait_for(member.backend.stats(), PROBE_SECONDS)
        return await task
    finally:
        task.cancel()


def _facts(member: Member) -> dict[str, Any]:
    return {
        "state": member.state.value,
        "role": None if member.admitted is None else role_of(member),
        "up": int(member.takes_requests),
        "ejected": int(member.state is MemberState.EJECTED),
        "open": member.open,
        "ejections": member.ejections,
        "failures": member.failures,
        "retries": member.retries,
        "saved_tokens": member.saved_tokens,
    }
