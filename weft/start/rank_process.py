"""A process that holds one rank's part of a model and executes the plans of the first rank.

The first rank starts it as `python -m weft.start.rank_process FD`; FD is one end of a socket pair. So the connection
has no name in the file system, and no other process can connect. The process ends when the first rank does.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.base.errors import ModelError, OptionError
from weft.base.transfers import TransferSettings
from weft.runner.ranks.channel import (
    BeginPart,
    CopyUnits,
    Join,
    JoinTransfers,
    Launch,
    LoadPart,
    PartJoined,
    PartLoaded,
    PartUnloadable,
    SupplyMasks,
    ToRank,
    TransferCall,
    decode_array,
    decode_plan,
    rank_channel,
)
from weft.wire.channel import Channel, ChannelClosed
from weft.wire.versions import VersionError

if TYPE_CHECKING:
    from weft.runner.ranks.part import LoadedPart
    from weft.runner.ranks.reporting import RankReporter
    from weft.runner.runner import Runner

log = logging.getLogger("weft")


def run_rank(channel: Channel, lifeline: Lifeline) -> int:
    """Load a part, join the group and execute plans until the first rank ends; return the process's exit code."""
    from weft.runner.ranks.reporting import RankReporter
    from weft.start.rank_loading import load_part

    begin: LoadPart = channel.receive(LoadPart)
    logging.basicConfig(level=begin.log_level, format=f"%(levelname)s %(name)s: rank {begin.rank}: %(message)s")
    try:
        part = load_part(begin.options, begin.rank, begin.ranks, begin.identify)
        channel.send(PartLoaded())
        join: Join = channel.receive(Join)
        runner = part.runner(begin.meeting, join.config, join.draft_room, join.threads)
    except (OptionError, ModelError) as error:
        return _refuse(channel, error)
    reporter = RankReporter(channel, runner, begin.rank)
    channel.send(PartJoined())
    return _execute(channel, lifeline, part, runner, reporter)


def _execute(channel: Channel, lifeline: Lifeline, part: LoadedPart, runner: Runner, reporter: RankReporter) -> int:
    """Do what the first rank sends, in order."""
    flight: Any = None
    while True:
        message: ToRank = channel.receive(ToRank)
        if isinstance(message, BeginPart):
            part.begin(runner)
            # What was saved is durable before the process ends. Not before: `begin` uses the file in this thread.
            lifeline.before_end = runner.close
            channel.send(PartJoined())
        elif isinstance(message, Launch):
            flight = runner.launch(decode_plan(message.plan))
        elif isinstance(message, SupplyMasks):
            runner.supply_masks(flight, decode_array(message.masks))
        elif isinstance(message, CopyUnits):
            reporter.begin(message)
        elif isinstance(message, TransferCall):
            assert reporter.transport is not None
            message.apply(reporter.transport)
        elif isinstance(message, JoinTransfers):
            try:
                channel.send(PartJoined(_join_transfers(part, runner, reporter, message.settings)))
            except OptionError as error:
                return _refuse(channel, error)


def _join_transfers(part: LoadedPart, runner: Runner, reporter: RankReporter, settings: TransferSettings) -> int | None:
    """Send or receive this rank's part of prefixes; return the port on which it receives them."""
    from weft.start.disaggregated import rank_transport

    transport, port = rank_transport(part, runner, settings)
    reporter.attach(transport)
    return port


def _refuse(channel: Channel, error: Exception) -> int:
    """Report why this rank cannot take part, and wait until the first rank has ended the group."""
    channel.send(PartUnloadable(str(error), isinstance(error, OptionError)))
    channel.receive(ToRank)
    return 1


class Lifeline:
    """Ends the process as soon as the first rank has ended, even while loading or during a step."""

    def __init__(self, connection: socket.socket) -> None:
        self.before_end: Callable[[], None] = lambda: None
        self._connection = connection
        self._thread = threading.Thread(target=self._watch, name="weft-first-rank", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the process, which comes when what was saved is durable."""
        self._thread.join()

    def _watch(self) -> None:
        hangup = select.poll()
        hangup.register(self._connection, 0)
        hangup.poll()
        self.before_end()
        os._exit(0)


def main() -> None:
    # A terminal or a service manager signals every process; only the first rank decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    channel, lifeline = rank_channel(connection), Lifeline(connection)
    try:
        code = run_rank(channel, lifeline)
    except VersionError as error:
        log.error("%s", error)
        lifeline.wait()
        code = 1
    except ChannelClosed:
        channel.shut_down()
        lifeline.wait()
        code = 0
    except Exception:
        log.exception("the rank failed and has stopped")
        code = 1
    # Threads of libraries must not delay the exit.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
