"""The first rank's view of a tensor-parallel group: it starts the other ranks, sends them its plans and hears them.

Each of them is `python -m weft.start.rank_process FD`, with one end of a socket pair as file descriptor FD. It ends
when the other end closes. The death of any rank ends the group: no rank can compute without the others.
"""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from weft.base.child_processes import child_environment
from weft.base.config import EngineConfig
from weft.base.errors import EngineStopped, ModelError, OptionError
from weft.base.options import Options
from weft.base.transfers import TransferEvent, TransferSettings
from weft.runner.ranks.channel import (
    Answer,
    BeginPart,
    CopyEnded,
    FromRank,
    Happened,
    Join,
    JoinTransfers,
    LoadPart,
    PartJoined,
    PartLoaded,
    PartUnloadable,
    rank_channel,
)
from weft.runner.ranks.meeting import new_meeting
from weft.wire.channel import Channel, ChannelClosed
from weft.wire.messages import Message
from weft.wire.versions import VersionError

log = logging.getLogger("weft")

PROGRAM = (sys.executable, "-P", "-m", "weft.start.rank_process")
GOODBYE_SECONDS = 10.0
# How long an engine with nothing else to do waits for a copy of another rank at a time.
COPY_SECONDS = 1e-3


class RankProcesses:
    """The other ranks of a group as processes. `close` ends them, and waits until they have ended."""

    def __init__(self, ranks: int, program: Sequence[str] = PROGRAM) -> None:
        """Start all processes. They import what they need, and wait for `load`."""
        self.ranks = ranks
        self.failure: str | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        # Called with the failure, once, from a thread.
        self.on_death: Callable[[str], None] = lambda failure: None
        # Called with a rank and an event of its transport, from a thread.
        self.on_event: Callable[[int, TransferEvent], None] = lambda rank, event: None
        # Guards what the ranks have reported, and is notified of it.
        self._news = threading.Condition()
        self._answers: dict[int, Answer] = {}
        self._copies: dict[int, list[CopyEnded]] = {}
        self._settled = threading.Event()
        self.meeting = new_meeting()
        try:
            for _ in range(1, self.ranks):
                self._start(program)
        except BaseException:
            self.close()
            raise

    def _start(self, program: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), self.meeting.descriptor],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=child_environment(),
                # Not in the terminal's group: Ctrl-C is for the front.
                process_group=0,
            )
        self.processes.append(process)
        self.channels.append(rank_channel(ours))

    def load(self, options: Options, identify: bool = False) -> None:
        """Let all ranks load their parts, and with `identify` compute their identities even without a file."""
        plain = Options(**{each.name: getattr(options, each.name) for each in fields(Options)})
        where = (self.ranks, self.meeting, log.getEffectiveLevel(), identify)
        for rank in range(1, self.ranks):
            # One that has ended by now is found by `join`.
            with suppress(ChannelClosed):
                self.channels[rank - 1].send(LoadPart(plain, rank, *where))

    def join(self, config: EngineConfig, draft_room: int, threads: int) -> None:
        """Wait until all ranks have loaded their parts, and let them join; raises what their loading raised."""
        for rank, channel in enumerate(self.channels, 1):
            try:
                found: FromRank = channel.receive(FromRank)
            except VersionError as error:
                raise ModelError(f"rank {rank}: {error}") from error
            except ChannelClosed as error:
                raise ModelError(f"{self._described(rank)} while it loaded the model; see its log") from error
            _check(rank, found)
            assert isinstance(found, PartLoaded)
        threading.Thread(target=self._listen, name="weft-ranks", daemon=True).start()
        self.send(Join(config, draft_room, threads))

    def begin(self) -> None:
        """Wait until all ranks have joined and have their memory, then let them begin; raises what a rank raised."""
        self._await_answers()
        self.send(BeginPart())
        self._await_answers()

    def join_transfers(self, settings: TransferSettings) -> list[int | None]:
        """Let all ranks send or receive their parts of prefixes; return where each of them receives them."""
        self.send(JoinTransfers(settings))
        return [found.port for found in self._await_answers()]

    def _await_answers(self) -> list[PartJoined]:
        with self._news:
            self._news.wait_for(lambda: self.failure is not None or len(self._answers) == len(self.channels))
            if self.failure is not None:
                raise EngineStopped(self.failure)
            answers = [self._answers.pop(rank) for rank in range(1, self.ranks)]
        for rank, found in enumerate(answers, 1):
            _check(rank, found)
        return [found for found in answers if isinstance(found, PartJoined)]

    def send(self, message: Message) -> None:
        for rank in range(1, self.ranks):
            self.send_to(rank, message)

    def send_to(self, rank: int, message: Message) -> None:
        try:
            self.channels[rank - 1].send(message)
        except ChannelClosed as error:
            raise self.stopped(error) from error

    def copied(self, ticket: int, wait: bool) -> list[CopyEnded] | None:
        """Return how the copies of a ticket have ended on all ranks, or None if they are under way on one."""
        with self._news:
            found = self._copies.setdefault(ticket, [])
            if wait and len(found) < len(self.channels):
                self._news.wait(COPY_SECONDS)
            if self.failure is not None:
                raise EngineStopped(self.failure)
            return self._copies.pop(ticket) if len(found) == len(self.channels) else None

    def stopped(self, error: Exception) -> Exception:
        """Return why a call has failed with this error: the death of a rank if there was one, else the error itself."""
        self._settled.wait(GOODBYE_SECONDS)
        return error if self.failure is None else EngineStopped(self.failure)

    def _listen(self) -> None:
        """Take what the ranks report, until one of them ends."""
        ready = select.poll()
        numbers = {channel.connection.fileno(): rank for rank, channel in enumerate(self.channels, 1)}
        for number in numbers:
            ready.register(number, select.POLLIN)
        while True:
            for number, _ in ready.poll():
                rank = numbers[number]
                try:
                    self._hear(rank, self.channels[rank - 1].receive(FromRank))
                except ChannelClosed:
                    self._bury(rank)
                    return

    def _hear(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Happened):
            self.on_event(rank, message.event)
            return
        with self._news:
            if isinstance(message, CopyEnded):
                self._copies.setdefault(message.ticket, []).append(message)
            else:
                self._answers[rank] = message
            self._news.notify_all()

    def _bury(self, rank: int) -> None:
        """End the ranks that wait for one that has ended."""
        if self._settled.is_set():
            return
        failure = f"{self._described(rank)}; its group cannot continue without it and has stopped"
        for process in self.processes:
            process.kill()
        log.error("%s", failure)
        with self._news:
            self.failure = failure
            self._news.notify_all()
        self._settled.set()
        self.on_death(failure)

    def _described(self, rank: int) -> str:
        process = self.processes[rank - 1]
        try:
            code: Any = process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            code = "none"
        return f"rank {rank} of {self.ranks} (process {process.pid}) has ended with exit code {code}"

    def close(self) -> None:
        """End all ranks and wait for them."""
        self._settled.set()
        for channel in self.channels:
            # Also wakes the thread that waits for hang-ups.
            channel.shut_down()
        for process in self.processes:
            try:
                process.wait(GOODBYE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self.channels:
            channel.close()


def _check(rank: int, found: FromRank) -> None:
    if isinstance(found, PartUnloadable):
        raise (OptionError if found.option else ModelError)(f"rank {rank}: {found.message}")
