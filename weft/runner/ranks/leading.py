"""The first rank: the device of an engine whose model is cut over ranks, and the other ranks' ends of transfers."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.base.copies import CopyPlan
from weft.base.errors import CopyFailed, EngineStopped, InvalidOption
from weft.base.plan import Ints, Landing, Plan
from weft.base.transfers import Destination, Offer, ReservedUnit, StagedUnit, TransferEvent
from weft.engine.device import Capabilities
from weft.runner.ranks.channel import (
    AbandonTransfer,
    CloseTransfers,
    CopyUnits,
    EndTransfer,
    FinishTransfer,
    GrantUnits,
    Launch,
    OpenTransfer,
    SendUnits,
    SupplyMasks,
    TransferCall,
    encode_array,
    encode_plan,
)
from weft.runner.ranks.processes import RankProcesses
from weft.runner.runner import Runner
from weft.wire.channel import ChannelClosed

if TYPE_CHECKING:
    from weft.memory.tiers.copies import HostCopies
    from weft.memory.tiers.disk.file import DiskFile
    from weft.memory.tiers.remote.tier import RemoteCopies


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Copies under way on all ranks: their number on the others, and the first rank's own."""

    ticket: int
    own: Any


class LeadingRunner:
    """The device of an engine with several ranks: every plan goes to all of them, and the first one's results count.

    Copies between tiers count when all ranks have made them, and have failed if one rank's have.
    """

    def __init__(self, runner: Runner, others: RankProcesses) -> None:
        self.runner = runner
        self.others = others
        self._tickets = itertools.count()

    def launch(self, plan: Plan) -> Any:
        self._check_alive()
        self.others.send(Launch(encode_plan(plan)))
        try:
            return self.runner.launch(plan)
        except RuntimeError as error:
            # Connections to a rank that has ended close.
            raise self.others.stopped(error) from error

    def supply_masks(self, flight: Any, masks: Ints) -> None:
        """Let all ranks sample the last plan. The first one decides, and the others learn its tokens."""
        self._check_alive()
        self.others.send(SupplyMasks(encode_array(masks)))
        try:
            self.runner.supply_masks(flight, masks)
        except RuntimeError as error:
            raise self.others.stopped(error) from error

    def _check_alive(self) -> None:
        if self.others.failure is not None:
            raise EngineStopped(self.others.failure)

    def land(self, flight: Any) -> Landing:
        return self.runner.land(flight)

    # the tiers below ------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.supply_masks, tiers=self)

    @property
    def disk(self) -> DiskFile:
        return self.runner.tiers.disk

    @property
    def remote(self) -> RemoteCopies:
        return self.runner.tiers.remote

    @property
    def load_bytes_per_second(self) -> float | None:
        return self.runner.tiers.load_bytes_per_second

    def allocate(self, size_bytes: int) -> HostCopies:
        raise InvalidOption("tensor_parallel", "must be 1 for prompts in files: each rank has a part of every unit")

    def copy(self, plan: CopyPlan) -> GroupCopy:
        self._check_alive()
        ticket = next(self._tickets)
        self.others.send(CopyUnits(ticket, plan))
        return GroupCopy(ticket, self.runner.tiers.copy(plan))

    def copied(self, flight: GroupCopy, wait: bool) -> float | None:
        failure: CopyFailed | None = None
        try:
            seconds = self.runner.tiers.copied(flight.own, wait)
            if seconds is None:
                return None
        except CopyFailed as error:
            seconds, failure = 0.0, error
        # Also after a failure here: until then, other ranks use the units.
        others = self.others.copied(flight.ticket, wait)
        if others is None:
            return None
        if failure is not None:
            raise failure
        for ended in others:
            if ended.error is not None:
                raise CopyFailed(ended.error)
        return max(seconds, *(ended.seconds for ended in others))

    def close(self) -> None:
        """End the other ranks, and release the tiers below."""
        self.others.close()
        self.runner.close()


class RankEnd:
    """The transport of another rank, as the first one uses it. Implements `Transport`; calls travel as messages."""

    send_seconds = 0.0
    send_bytes_per_second: float | None = None

    def __init__(self, others: RankProcesses, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._others = others
        self._rank = rank
        self._events: deque[TransferEvent] = deque()
        self._happened = threading.Event()

    def report(self, event: TransferEvent) -> None:
        """Add an event that the rank has reported. Any thread may call it."""
        self._events.append(event)
        self._happened.set()
        self.wake()

    def _call(self, call: TransferCall) -> None:
        self._others.send_to(self._rank, call)

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        self._call(OpenTransfer(transfer, destination, offer))

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        self._call(SendUnits(transfer, units))

    def finish(self, transfer: int) -> None:
        self._call(FinishTransfer(transfer))

    def abandon(self, transfer: int) -> None:
        self._call(AbandonTransfer(transfer))

    def grant(self, transfer: int, first: int, end: int, point: bool, units: Sequence[ReservedUnit]) -> None:
        self._call(GrantUnits(transfer, first, end, point, units))

    def confirm(self, transfer: int) -> None:
        self._call(EndTransfer(transfer, None))

    def refuse(self, transfer: int, reason: str) -> None:
        self._call(EndTransfer(transfer, reason))

    def poll(self) -> list[TransferEvent]:
        self._happened.clear()
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._events.popleft())
        return found

    def wait(self, seconds: float) -> None:
        self._happened.wait(seconds)

    def close(self) -> None:
        # A rank that has ended has no connections.
        with suppress(EngineStopped, ChannelClosed):
            self._call(CloseTransfers())


def rank_ends(others: RankProcesses) -> list[RankEnd]:
    """Return the transports of the other ranks, in order. Call it before they join: events may follow at once."""
    ends = [RankEnd(others, rank) for rank in range(1, others.ranks)]
    others.on_event = lambda rank, event: ends[rank - 1].report(event)
    return ends
