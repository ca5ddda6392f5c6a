"""A request of a fleet as its caller sees it: outputs of one member, or of the next one until a member has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError
from weft.engine.events import Output
from weft.engine.request import Request
from weft.fleet.member import LEFT, Member
from weft.fleet.pairing import PrefillLeg


class FleetStream(OutputStream):
    """Reads from the member's own stream, in the reader's task. `move` submits the request to another member.

    A stream moves only while the reader has got nothing, so no token can arrive twice. `started` is called with the
    first outputs, and `closed` once, when nothing more will be read from a member.
    """

    __slots__ = (
        "_abandoned",
        "_arrive",
        "_closed",
        "_ending",
        "_inner",
        "_leg",
        "_move",
        "_started",
        "failures",
        "member",
        "request",
        "tried",
    )

    def __init__(
        self,
        number: int,
        loop: asyncio.AbstractEventLoop,
        request: Request,
        move: Callable[[FleetStream, EngineStopped], Awaitable[None]],
        started: Callable[[FleetStream], None],
        closed: Callable[[FleetStream], None],
        arrive: Callable[[FleetStream, Member, bool], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(number, loop)
        self.request = request
        self.member: Member | None = None
        # Names of members that had the request, and how many of them failed with it.
        self.tried: set[str] = set()
        self.failures = 0
        self._inner: OutputStream | None = None
        self._move = move
        self._started = started
        self._closed: Callable[[FleetStream], None] | None = closed
        self._abandoned = False
        # The way of the prompt over a prefill engine, and the member that answers afterwards.
        self._leg: tuple[PrefillLeg, Member] | None = None
        self._arrive = arrive
        # Whether the caller has ended it, as if the model had stopped (True) or by an abort.
        self._ending: bool | None = None

    @property
    def begun(self) -> bool:
        """Whether outputs have arrived: from then on the request stays where it is."""
        return self._begun or (self._inner is not None and self._inner.begun and not self._abandoned)

    @property
    def may_move(self) -> bool:
        return not self.begun and self._ending is None

    async def __anext__(self) -> list[Output]:
        while True:
            while self._leg is not None:
                await self._finish_leg(*self._leg)
            assert self._inner is not None
            try:
                outputs = await anext(self._inner)
            except StopAsyncIteration:
                self.report = self._inner.report
                self.close()
                raise
            except EngineStopped as error:
                await self._leave(error)
                continue
            if self._abandoned:
                # They arrived between the decision to move and the reader's turn.
                await self._leave(EngineStopped(LEFT))
                continue
            if not self._begun:
                self._begun = True
                self._started(self)
            self.report = self._inner.report
            if outputs[-1].finish is not None:
                self.close()
            return outputs

    async def _leave(self, error: EngineStopped) -> None:
        """Move to another member, or raise if that is not allowed or not possible."""
        await self._placed(self._move(self, error))

    async def _finish_leg(self, leg: PrefillLeg, member: Member) -> None:
        """Wait until the prompt was sent to the member, or will not be; then go there."""
        assert self._arrive is not None
        try:
            await leg.wait()
        except BaseException:
            # The reader has gone.
            leg.abort()
            self.close()
            raise
        self._leg = None
        self.leave()
        await self._placed(self._arrive(self, member, leg.sent))

    async def _placed(self, placing: Awaitable[None]) -> None:
        try:
            await placing
        except RequestError as refused:
            # The reader expects no refusal after submission.
            self.close()
            raise EngineStopped(str(refused)) from None
        except BaseException:
            self.close()
            raise

    # for the fleet --------------------------------------------------------------------------------------------------

    def enter(self, member: Member, inner: OutputStream) -> None:
        """Read from this member from now on."""
        self.member, self._inner, self._abandoned = member, inner, False
        if not self.is_closed:
            member.enter(self)
        if self._ending is not None:
            self._send_end()

    def follow(self, leg: PrefillLeg, member: Member) -> None:
        """Let the reader wait for the prompt's way over a prefill engine, and then go to this member."""
        self._leg = (leg, member)
        if self.is_closed:
            leg.abort()
            return
        self.member, self._inner = member, None
        member.enter(self)
        if not member.takes_requests:
            # It was ejected while the prefill engine accepted the prompt.
            self.abandon()

    def leave(self) -> None:
        if self.member is not None:
            self.member.leave(self)
            self.member = None

    def abandon(self) -> None:
        """Give up a member that has not begun, so that the reader moves the request."""
        if self._leg is not None:
            # The prompt would be sent to an engine that does not read it.
            self._leg[0].abort()
            return
        if self.begun or self._abandoned or self.member is None or self._inner is None:
            return
        self._abandoned = True
        self.member.backend.abort(self._inner)
        self._inner.fail(LEFT)

    def ask_to_end(self, stopped: bool) -> None:
        """End the request at its member, and at one that is about to accept it."""
        if self.is_closed:
            return
        self._ending = stopped
        if self._leg is not None:
            self._leg[0].abort()
        self._send_end()
        if not stopped:
            # The caller of an abort may never read again.
            self.close()

    def _send_end(self) -> None:
        if self.member is None or self._inner is None:
            return
        backend = self.member.backend
        (backend.finish if self._ending else backend.abort)(self._inner)

    @property
    def is_closed(self) -> bool:
        return self._closed is None

    def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(self)
        self.leave()
