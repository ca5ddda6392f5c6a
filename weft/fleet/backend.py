"""A backend made of backends: chooses a member for each request, retries, ejects, readmits, drains.

A request moves to another member only while its caller has got no output. A member that dies fails the requests that it
has begun, and no others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

from weft.backends.backend import Backend, Hear, ModelInfo
from weft.backends.life import MAX_OPEN, SHUTTING_DOWN, BackendLife
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, ModelError, RequestError, WeftError
from weft.base.tenants import Dropped
from weft.engine.protocol import EngineNews
from weft.engine.request import Request
from weft.fleet.choosing import Chooser, LeastOpen
from weft.fleet.member import LEFT, Member, MemberState
from weft.fleet.pairing import (
    PrefillLeg,
    PrefillPool,
    answers_requests,
    destination_of,
    revisions_of,
    role_of,
)
from weft.fleet.questions import NONE_AVAILABLE, PROBE_SECONDS, MemberQuestions
from weft.fleet.stream import FleetStream
from weft.fleet.totals import difference, total_info
from weft.fleet.traces import MemberTraces
from weft.fleet.warm_up import WarmUp

log = logging.getLogger("weft")

# Interval between looks at the members' health.
CHECK_SECONDS = 0.5
# A request may be what ends engines, so it is not tried on all of them.
MOST_FAILURES = 2
# Members in these states never take requests again.
GONE = (MemberState.DRAINING, MemberState.FAILED)
ALL_ENDED = "all replicas have ended"


class FleetBackend(BackendLife[FleetStream]):
    """Implements `Backend` over members that serve the same model.

    `patient`: start with the first member that is ready, and wait for it without limit; otherwise all must start.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, Backend]],
        *,
        chooser: Chooser | None = None,
        max_open: int = MAX_OPEN,
        patient: bool = False,
        clock: Callable[[], float] = time.monotonic,
        check_seconds: float | None = CHECK_SECONDS,
    ) -> None:
        super().__init__(max_open)
        self.members = [Member(name, backend, clock) for name, backend in members]
        self.chooser: Chooser = chooser or LeastOpen()
        self.info: ModelInfo
        self._clock = clock
        self._patient = patient
        self._check_seconds = check_seconds
        self._pool = PrefillPool()
        self._admitted = asyncio.Event()
        self._warm_up = WarmUp(self.chooser, lambda: any(self._answering()))
        self._questions = MemberQuestions(self.members, lambda: self._closed, self._warm_up.forget)
        self._traces = MemberTraces(self.members)
        self._tasks: set[asyncio.Task[None]] = set()

    # start and stop -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all members at once; raises what the first failure raises, unless the fleet is patient."""
        starting = [self._begin(member) for member in self.members if member.starting is None]
        try:
            if self._patient:
                await self._admitted.wait()
            else:
                await asyncio.gather(*starting)
        except BaseException:
            await self._abandon_start()
            raise
        self._closed = None
        if self._check_seconds is not None:
            self._spawn(self._watch(self._check_seconds))

    def add(self, name: str, backend: Backend) -> None:
        """Let another member join when it is ready, before or after the start of the fleet, which must be patient."""
        member = Member(name, backend, self._clock)
        self.members.append(member)
        self._traces.joined(member)
        self._begin(member)

    def remove(self, name: str, drain_seconds: float) -> None:
        """Give a member no more requests; let it finish those that it has begun, for this long, then forget it."""
        member = next((each for each in self.members if each.name == name), None)
        if member is not None and member.state is not MemberState.DRAINING:
            member.state = MemberState.DRAINING
            self.chooser.removed(member)
            member.give_up()
            self._spawn(self._leave(member, drain_seconds))

    async def _leave(self, member: Member, drain_seconds: float) -> None:
        for task in (member.starting, member.watching):
            if task is not None:
                task.cancel()
        if member.streams:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.emptied.wait(), drain_seconds)
        self.members.remove(member)
        self._traces.left(member)
        await member.backend.stop(0)
        log.info("replica %s has left", member.name)

    def _begin(self, member: Member) -> asyncio.Task[None]:
        member.starting = self._spawn(self._start(member))
        return member.starting

    async def _abandon_start(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.backend.stop(0) for member in self.members))

    async def _start(self, member: Member) -> None:
        await member.backend.start()
        if not self._patient and (wrong := self._mismatch(member)) is not None:
            raise ModelError(wrong)
        if self._closed is None:
            await self._warm(member)
        self._admit(member)
        member.watching = self._spawn(self._await_failure(member))
        up = len(self._in_state(MemberState.UP))
        log.info("replica %s is ready: role %s (%d of %d)", member.name, role_of(member), up, len(self.members))

    async def _warm(self, member: Member) -> None:
        """Let a new engine compute the prefixes that are wanted most, for a while, before it takes requests.

        Not if requests wait for it because no other member takes any.
        """
        if member.state in GONE or self._mismatch(member) is not None:
            return
        member.state = MemberState.WARMING
        await self._warm_up.run(member)

    def _admit(self, member: Member) -> None:
        """Let a member take requests, if it serves the same model as the others."""
        if member.state in GONE:
            return
        if (wrong := self._mismatch(member)) is not None:
            log.error("%s; it gets no requests", wrong)
            member.state = MemberState.REFUSED
            self.chooser.removed(member)
            return
        self._note_other_code(member)
        member.readmit()
        self.chooser.added(member)
        self.info = total_info([each.backend.info for each in self._in_state(MemberState.UP)])
        self._admitted.set()

    def _note_other_code(self, member: Member) -> None:
        """Log that the states of a member are of no use to the others, as in a rolling upgrade."""
        ours = revisions_of(member)
        for each in self._in_state(MemberState.UP):
            if each is not member and revisions_of(each) != ours:
                log.warning(
                    "replica %s computes %s, but replica %s computes %s: they exchange no states",
                    *(member.name, ours, each.name, revisions_of(each)),
                )
                return

    def _mismatch(self, member: Member) -> str | None:
        known = next((each for each in self._in_state(MemberState.UP, MemberState.EJECTED) if each is not member), None)
        wrong = None if known is None else difference(known.backend.info, member.backend.info)
        if known is None or wrong is None:
            return None
        return f"replica {member.name} serves another model than replica {known.name}: {wrong}"

    async def stop(self, drain_seconds: float) -> None:
        await self._let_finish(drain_seconds)
        self._closed = self._closed or SHUTTING_DOWN
        self._traces.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.backend.stop(0) for member in self.members))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    # requests -------------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether at least one member accepts requests."""
        return super().healthy and any(self._answering())

    async def submit(self, request: Request) -> OutputStream:
        self._check_room()
        loop = asyncio.get_running_loop()
        stream = FleetStream(next(self._numbers), loop, request, self._move, self._begun, self._ended, self._arrive)
        self._streams[stream.id] = stream
        try:
            await self._place(stream, EngineStopped(NONE_AVAILABLE))
        except BaseException:
            stream.close()
            raise
        return stream

    def _answering(self) -> Iterator[Member]:
        return (member for member in self.members if member.takes_requests and answers_requests(member))

    async def _place(self, stream: FleetStream, error: Exception) -> None:
        """Submit a request to the best member that has not had it; raises if none accepts it."""
        while not stream.is_closed and stream.failures < MOST_FAILURES:
            # Anew each time: members come and go while one of them considers the request.
            available = [member for member in self._answering() if member.name not in stream.tried]
            ranked = self.chooser.rank(stream.id, stream.request, available)
            if not ranked:
                break
            member = ranked[0]
            stream.tried.add(member.name)
            leg = await self._begin_leg(stream, member)
            if leg is not None and stream.is_closed:
                leg.abort()
            if stream.is_closed:
                raise error
            self.chooser.placed(stream.id, stream.request, member, disaggregated=leg is not None)
            if leg is not None:
                # The reader goes on to the member when the prompt was sent there.
                stream.follow(leg, member)
                return
            failed = await self._submit_to(stream, member)
            if failed is None:
                return
            error = failed
        raise error

    async def _submit_to(self, stream: FleetStream, member: Member) -> Exception | None:
        """Submit a request to a member; return None if it has it, or why another one should get it."""
        try:
            inner = await member.submit(self.chooser.hinted(stream.id, stream.request, member))
        except EngineStopped as stopped:
            self._note_lost(stream, member)
            self.chooser.left(stream.id)
            return stopped
        except RequestError as refused:
            # Only a full member says nothing about the request itself.
            if refused.status != 429:
                raise
            self.chooser.left(stream.id)
            return refused
        stream.enter(member, inner)
        if not member.takes_requests:
            # It was ejected while it accepted the request.
            stream.abandon()
        if stream.is_closed:
            self.chooser.ended(stream.id)
        return None

    async def _begin_leg(self, stream: FleetStream, member: Member) -> PrefillLeg | None:
        """Let a prefill engine compute the prompt of a request, if that pays and one accepts it."""
        prefillers = self._pool.fitting(self.members, member)
        destination, request = destination_of(member), stream.request
        if not prefillers or destination is None or request.params.reads_from is not None:
            return None
        number = next(self._numbers)
        chosen = self.chooser.prefill(stream.id, number, request, member, prefillers)
        if not chosen:
            return None
        leg = PrefillLeg(number, request, destination, chosen, self.chooser, self._note_leg_failure)
        return leg if await leg.begin() else None

    def _note_leg_failure(self, member: Member) -> None:
        member.retries += 1
        self._note_failure(member)

    async def _arrive(self, stream: FleetStream, member: Member, sent: bool) -> None:
        """Submit a request to the member that its prompt was `sent` to, or to another one."""
        failed: Exception | None = EngineStopped(LEFT)
        if stream.is_closed:
            raise EngineStopped(LEFT)
        if not sent or not member.takes_requests:
            self.chooser.left(stream.id)
        if not member.takes_requests:
            member.retries += 1
        else:
            if not sent:
                self.chooser.placed(stream.id, stream.request, member)
            failed = await self._submit_to(stream, member)
        if failed is not None:
            await self._place(stream, failed)

    async def _move(self, stream: FleetStream, error: EngineStopped) -> None:
        """Submit a request to another member, because the one that had it has ended or is silent."""
        member, may_move = stream.member, stream.may_move
        if member is not None:
            self._note_lost(stream, member, moves=may_move)
        if member is None or not may_move:
            raise error
        self.chooser.left(stream.id)
        stream.leave()
        await self._place(stream, error)

    def _note_lost(self, stream: FleetStream, member: Member, moves: bool = True) -> None:
        """Note that a member does not answer a request, which `moves` to another one."""
        member.retries += moves
        # An operator who removes members does not make a request suspect.
        if member.state is not MemberState.DRAINING:
            self._note_failure(member)
            stream.failures += moves

    def _note_failure(self, member: Member) -> None:
        member.failures += 1
        self._eject(member)

    def _eject(self, member: Member) -> None:
        if member.eject():
            log.warning("replica %s is ejected until it answers again", member.name)
            self.chooser.removed(member)

    def _begun(self, stream: FleetStream) -> None:
        self.chooser.started(stream.id)

    def _ended(self, stream: FleetStream) -> None:
        self._forget(stream.id)
        self.chooser.ended(stream.id)
        if stream.member is not None and stream.report is not None:
            stream.member.saved_tokens += stream.report.cached_tokens

    def abort(self, stream: OutputStream) -> None:
        assert isinstance(stream, FleetStream)
        stream.ask_to_end(stopped=False)

    def finish(self, stream: OutputStream) -> None:
        assert isinstance(stream, FleetStream)
        stream.ask_to_end(stopped=True)

    # health ---------------------------------------------------------------------------------------------------------

    async def _watch(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.check()

    def check(self) -> None:
        """Eject members that have become unhealthy; ask ejected ones for a sign of life once their pause is over."""
        for member in self.members:
            if member.state is MemberState.UP and not member.serves:
                self._eject(member)
            returns = member.state in (MemberState.EJECTED, MemberState.REFUSED) and member.pause_is_over
            if returns and member.backend.healthy and member.probing is None:
                member.probing = self._spawn(self._probe(member))

    async def _probe(self, member: Member) -> None:
        try:
            await asyncio.wait_for(member.backend.stats(), PROBE_SECONDS)
        except (WeftError, TimeoutError):
            member.postpone()
        else:
            if member.backend.info is not member.admitted:
                await self._warm(member)
            self._admit(member)
            log.info("replica %s answers again: it is %s", member.name, member.state)
            if member.state is MemberState.REFUSED:
                member.postpone()
        finally:
            member.probing = None

    async def _await_failure(self, member: Member) -> None:
        reason = await member.backend.wait_failed()
        log.error("replica %s has ended for good: %s", member.name, reason)
        member.state = MemberState.FAILED
        member.give_up()
        self.chooser.removed(member)
        # Prefill engines alone answer nothing.
        answering = [each for each in self.members if answers_requests(each)]
        if not self._patient and all(each.state is MemberState.FAILED for each in answering):
            self._closed = ALL_ENDED
            self._fail_for_good(f"{ALL_ENDED}; the last one: {reason}")

    def _in_state(self, *states: MemberState) -> list[Member]:
        return [member for member in self.members if member.state in states]

    # reports --------------------------------------------------------------------------------------------------------

    async def flush(self) -> int:
        return await self._questions.flush()

    async def drop(self, tenant: bytes | None, prefix: bytes | None) -> dict[str, Any]:
        return await self._questions.drop(Dropped(tenant, prefix))

    async def stats(self) -> dict[str, Any]:
        return await self._questions.stats()

    async def cache_report(self, limit: int) -> dict[str, Any]:
        return await self._questions.cache_report(limit)

    def watch(self, hear: Hear) -> None:
        self._traces.watch(hear)

    def unwatch(self, hear: Hear) -> None:
        self._traces.unwatch(hear)

    async def request_facts(self, name: str) -> list[dict[str, Any]]:
        return await self._questions.request_facts(name)

    def subscribe(self, hear: Callable[[EngineNews], None]) -> None:
        """Call `hear` with the news of every member; each has its own epoch."""
        for member in self.members:
            member.backend.subscribe(hear)

    def unsubscribe(self, hear: Callable[[EngineNews], None]) -> None:
        for member in self.members:
            member.backend.unsubscribe(hear)


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, WeftError):
        log.error("a task of the fleet failed", exc_info=error)
