"""The first rank's view of a tensor-parallel group: it starts the other ranks, and sends them its plans.

Each of them is `python -m weft.rank_process FD`, with one end of a socket pair as file descriptor FD. It ends when the
other end closes. The death of any rank ends the group: no rank can compute without the others.
"""

from __future__ import annotations

import logging
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.base.child_processes import child_environment
from weft.base.config import EngineConfig
from weft.base.errors import EngineStopped, ModelError, OptionError
from weft.base.options import Options
from weft.base.plan import Landing, Plan
from weft.runner.ranks.channel import (
    Channel,
    ChannelClosed,
    FromRank,
    Join,
    Launch,
    LoadPart,
    PartLoaded,
    PartUnloadable,
    encode_plan,
)
from weft.runner.runner import Runner

log = logging.getLogger("weft")

PROGRAM = (sys.executable, "-P", "-m", "weft.rank_process")
GOODBYE_SECONDS = 10.0


class RankProcesses:
    """The other ranks of a group as processes. `close` ends them, and waits until they have ended."""

    def __init__(self, options: Options, program: Sequence[str] = PROGRAM) -> None:
        """Start all processes; they load their parts at once."""
        self.ranks = options.tensor_parallel
        self.failure: str | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        # Called with the failure, once, from a thread.
        self.on_death: Callable[[str], None] = lambda failure: None
        self._settled = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
        self.meeting = self._folder / "meeting"
        plain = Options(**{each.name: getattr(options, each.name) for each in fields(Options)})
        try:
            for rank in range(1, self.ranks):
                self._start(rank, plain, program)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, options: Options, program: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=child_environment(),
                # Not in the terminal's group: Ctrl-C is for the front.
                process_group=0,
            )
        self.processes.append(process)
        self.channels.append(Channel(ours))
        self.channels[-1].send(LoadPart(options, rank, self.ranks, str(self.meeting), log.getEffectiveLevel()))

    def join(self, config: EngineConfig, draft_room: int, threads: int) -> None:
        """Wait until all ranks have loaded their parts, and let them join; raises what their loading raised."""
        for rank, channel in enumerate(self.channels, 1):
            try:
                found: FromRank = channel.receive(FromRank)
            except ChannelClosed as error:
                raise ModelError(f"{self._described(rank)} while it loaded the model; see its log") from error
            if isinstance(found, PartUnloadable):
                raise (OptionError if found.option else ModelError)(f"rank {rank}: {found.message}")
            assert isinstance(found, PartLoaded)
        threading.Thread(target=self._watch, name="weft-ranks", daemon=True).start()
        self.send(Join(config, draft_room, threads))

    def send(self, message: Join | Launch) -> None:
        try:
            for channel in self.channels:
                channel.send(message)
        except ChannelClosed as error:
            raise self.stopped(error) from error

    def stopped(self, error: Exception) -> Exception:
        """Return why a call has failed with this error: the death of a rank if there was one, else the error itself."""
        self._settled.wait(GOODBYE_SECONDS)
        return error if self.failure is None else EngineStopped(self.failure)

    def _watch(self) -> None:
        """Wait for the end of any rank, and then end the others, which wait for it."""
        hangup = select.poll()
        numbers = {channel.connection.fileno(): rank for rank, channel in enumerate(self.channels, 1)}
        for number in numbers:
            hangup.register(number, 0)
        rank = numbers[hangup.poll()[0][0]]
        if self._settled.is_set():
            return
        self.failure = f"{self._described(rank)}; its group cannot continue without it and has stopped"
        for process in self.processes:
            process.kill()
        log.error("%s", self.failure)
        self._settled.set()
        self.on_death(self.failure)

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
        shutil.rmtree(self._folder, ignore_errors=True)


class LeadingRunner:
    """The device of an engine with several ranks: every plan goes to all of them, and the first one's results count."""

    def __init__(self, runner: Runner, others: RankProcesses) -> None:
        self.runner = runner
        self.others = others

    def launch(self, plan: Plan) -> Any:
        if self.others.failure is not None:
            raise EngineStopped(self.others.failure)
        self.others.send(Launch(encode_plan(plan)))
        try:
            return self.runner.launch(plan)
        except RuntimeError as error:
            # Connections to a rank that has ended close.
            raise self.others.stopped(error) from error

    def land(self, flight: Any) -> Landing:
        return self.runner.land(flight)

    def close(self) -> None:
        """End the other ranks."""
        self.others.close()
        self.runner.close()
