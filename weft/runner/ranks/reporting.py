"""Reports of a rank to the first one: copies that have landed, and events of its transport.

Steps run in the rank's main thread, which may wait for the other ranks; reports have a thread of their own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from dataclasses import replace
from typing import Any

from weft.base.errors import CopyFailed
from weft.base.transfers import Transport
from weft.runner.ranks.channel import CopyEnded, CopyUnits, Happened
from weft.runner.runner import Runner
from weft.wire.channel import Channel, ChannelClosed

log = logging.getLogger("weft")


class RankReporter:
    """Begins copies in the caller's thread, and reports them in its own when they have landed."""

    def __init__(self, channel: Channel, runner: Runner, rank: int) -> None:
        self.transport: Transport | None = None
        self._channel = channel
        self._runner = runner
        self._rank = rank
        self._flights: deque[tuple[int, Any]] = deque()
        self._rung = threading.Event()
        threading.Thread(target=self._run, name="weft-rank-reports", daemon=True).start()

    def begin(self, message: CopyUnits) -> None:
        # The first rank has seen its own steps end, which says nothing about the steps of this device.
        flight = self._runner.tiers.copy(replace(message.plan, after_steps=True))
        self._flights.append((message.ticket, flight))
        self._rung.set()

    def attach(self, transport: Transport) -> None:
        """Report the events of a transport, also those that it has had already."""
        transport.wake = self._rung.set
        self.transport = transport
        self._rung.set()

    def _run(self) -> None:
        try:
            while True:
                if not self._flights:
                    self._rung.wait()
                self._rung.clear()
                self._report_events()
                self._report_copies()
        except ChannelClosed:
            # The first rank has ended, and so does this process.
            return
        except BaseException:
            log.exception("the rank failed and has stopped")
            logging.shutdown()
            os._exit(1)

    def _report_events(self) -> None:
        for event in () if self.transport is None else self.transport.poll():
            self._channel.send(Happened.of(event))

    def _report_copies(self) -> None:
        wait = True
        for _ in range(len(self._flights)):
            ticket, flight = self._flights.popleft()
            ended = self._ended(ticket, flight, wait)
            if ended is None:
                # Copies of one tier do not wait for those of another.
                self._flights.append((ticket, flight))
                wait = False
            else:
                self._channel.send(ended)

    def _ended(self, ticket: int, flight: Any, wait: bool) -> CopyEnded | None:
        try:
            seconds = self._runner.tiers.copied(flight, wait)
        except CopyFailed as error:
            return CopyEnded(ticket, 0.0, f"rank {self._rank}: {error}")
        return None if seconds is None else CopyEnded(ticket, seconds)
