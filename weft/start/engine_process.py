"""The engine process: loads a model and steps it for the front at the other end of its socket.

Started as `python -m weft.start.engine_process FD`, with one end of a socket pair as file descriptor FD: it has no
name in the file system, and no other process can connect. The process ends on command, when a step fails, or when the
front ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from weft import builtin
from weft.backends.backend import ModelInfo
from weft.backends.codec import Begin, EngineWriter, Unloadable, decode_begin, decode_command
from weft.base.errors import ModelError, OptionError
from weft.base.garbage_collection import freeze_heap
from weft.base.logs import set_up_logging
from weft.base.options import Options
from weft.base.transfers import TransferSettings
from weft.engine.preparation import OwnCommand
from weft.engine.protocol import Command, Event, Shutdown
from weft.engine.service import Drivable, Service
from weft.text.identity import text_digest
from weft.text.tokenizer import find_text_files, text_place
from weft.wire.frames import Frames, ProtocolError

if TYPE_CHECKING:
    from weft.engine.loop import Engine

log = logging.getLogger("weft")

READ_BYTES = 1 << 18
# Maximum bytes read between two steps, so that a flood of long prompts does not delay running rows.
READ_PER_STEP_BYTES = 1 << 24
# Room for the outputs of many steps while the front is busy.
SEND_BUFFER_BYTES = 1 << 20


# The settings of transfers are given only for a role other than both.
Load = Callable[..., tuple[Drivable, ModelInfo]]


class SocketInbox:
    """Commands from the front, and from threads of this process.

    Unreadable frames are dropped; a frame that is too long ends the service.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._bodies: list[bytes] = []
        self._read_bytes = 0
        self._own: deque[OwnCommand] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def put(self, command: OwnCommand) -> None:
        self._own.append(command)
        self._ringer.send(b"!")

    def first(self) -> Begin:
        while not self._bodies:
            if not self._read():
                raise ProtocolError("the front closed the connection without a message")
        return decode_begin(self._bodies.pop(0))

    def take(self, wait: bool) -> list[Command | OwnCommand]:
        commands: list[Command | OwnCommand] = list(self._decode())
        self._read_bytes = 0
        while self._read_bytes < READ_PER_STEP_BYTES and (
            ready := self._poll.poll(None if wait and not commands else 0)
        ):
            for number, _ in ready:
                if number == self._bell.fileno():
                    commands += self._heard()
                elif self._read():
                    commands += self._decode()
                else:
                    return [*commands, Shutdown()]
        return commands

    def _heard(self) -> list[OwnCommand]:
        rung = len(self._bell.recv(READ_BYTES))
        return [self._own.popleft() for _ in range(rung)]

    def _read(self) -> bool:
        """Read available commands; return whether more may follow."""
        data = self._connection.recv(READ_BYTES)
        self._read_bytes += len(data)
        try:
            self._bodies = self._frames.feed(data)
        except ProtocolError:
            log.exception("the front sent an oversized frame")
            return False
        return bool(data)

    def _decode(self) -> list[Command]:
        commands: list[Command] = []
        for body in self._bodies:
            try:
                commands.append(decode_command(body))
            except ProtocolError as error:
                log.error("dropped an unreadable frame: %s", error)
        self._bodies = []
        return commands


def run_engine(connection: socket.socket, load: Load) -> int:
    """Serve the front at the other end; return the exit code of the process."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    inbox, writer = SocketInbox(connection), EngineWriter()
    begin = inbox.first()
    set_up_logging(begin.log_level, begin.log_format)
    if begin.cores and hasattr(os, "sched_setaffinity"):
        # Before any library starts threads, which inherit it.
        os.sched_setaffinity(0, begin.cores)
    threading.Thread(target=_end_with_front, args=(connection,), daemon=True).start()
    try:
        engine, info = load(begin.options, begin.progress, *([] if begin.transfer is None else [begin.transfer]))
    except (OptionError, ModelError) as error:
        connection.sendall(writer.frame(Unloadable(str(error), isinstance(error, OptionError))))
        return 1
    freeze_heap()
    connection.sendall(writer.frame(info))

    def deliver(event: Event) -> None:
        connection.sendall(writer.event(event))

    return 0 if Service(engine, deliver, info.vocab_size).run(inbox) else 1


def _end_with_front(connection: socket.socket) -> None:
    """End the process as soon as the front has ended, even while loading or during a step."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    log.error("the front has ended: ending the engine process")
    os._exit(1)


def _end_with_rank(failure: str) -> None:
    """End the process: without a rank, no step can be computed."""
    logging.shutdown()
    os._exit(1)


def load_engine(
    options: Options,
    progress: bool,
    transfer: TransferSettings | None = None,
    now: Callable[[], float] = perf_counter,
) -> tuple[Engine, ModelInfo]:
    """Load a model and return its engine, which measures steps by the clock `now`, and facts about both.

    Everything with tensors is imported here.
    """
    from weft.runner.ranks.processes import RankProcesses

    # First, so that all ranks import their libraries at the same time.
    others = RankProcesses(options.tensor_parallel) if options.tensor_parallel > 1 else None
    from weft.engine.loop import Engine
    from weft.memory.capacity import longest_alone
    from weft.start.disaggregated import join, with_areas
    from weft.start.loading import load

    loaded = load(options, progress, disaggregated=transfer is not None, others=others)
    loaded = loaded if transfer is None else with_areas(loaded, transfer)
    config, model = loaded.config, loaded.model
    if loaded.others is not None:
        loaded.others.on_death = _end_with_rank
    runner = loaded.runner(options.threads, progress)
    drafter = loaded.draft_model(runner, options.threads, progress)
    joined = None if transfer is None else join(loaded, runner, transfer)
    transport = None if joined is None else joined.transport
    parts = (loaded.spec, runner, config, loaded.grammars())
    engine = Engine(*parts, draft_model=drafter, transport=transport, now=now, saves=loaded.saves)
    folder = _folder(options)
    info = ModelInfo(
        name=_name(options.model),
        architecture=_architecture(folder),
        dtype=loaded.dtype,
        vocab_size=model.vocab_size,
        max_length=config.max_length,
        memory_bytes=config.memory_bytes,
        memory_tokens=longest_alone(loaded.spec, config.memory_bytes),
        max_sequences=config.max_sequences,
        settings=asdict(config)
        | {
            "folder": str(folder),
            "tensor_parallel": options.tensor_parallel,
            "device": loaded.described_device(options.threads),
            "auto": dict(loaded.reasons),
            "weights": {"bytes": dict(model.held.bytes), "decode_bytes": model.held.decode_bytes},
            "end_tokens": sorted(loaded.end_tokens),
            "vectors": to_builtins(loaded.vectors),
            "digest": text_digest(folder, _text_folder(options, folder)),
        }
        | quantised_by(options)
        | ({} if joined is None else joined.facts),
    )
    return engine, info


def quantised_by(options: Options) -> dict[str, Any]:
    """Return the options by which an engine computes other numbers than its checkpoint has, if there are any."""
    found: dict[str, Any] = {}
    if options.quantize != "off":
        found |= {"quantize": options.quantize, "quantize_head": options.quantize_head}
    return found if options.activations == "auto" else found | {"activations": options.activations}


def _folder(options: Options) -> Path:
    from weft.models.finding import find_checkpoint

    return find_checkpoint(builtin.place_of(options.model), options.weights != "dummy")


def _text_folder(options: Options, folder: Path) -> Path:
    if options.tokenizer is not None:
        return find_text_files(builtin.place_of(options.tokenizer))
    return text_place(folder)


def _name(model: str | None) -> str:
    """Return a hub id unchanged; for a folder only its name, because clients must not see its path."""
    if model is None:
        return builtin.NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _architecture(folder: Path) -> str:
    from weft.models.config import checkpoint_config

    config = checkpoint_config(folder)
    return str((config.get("architectures") or [config.get("model_type", "unknown")])[0])


def main(load: Load = load_engine) -> None:
    # A terminal or a service manager signals every process; only the front decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    code = run_engine(connection, load)
    # Threads of libraries must not delay the exit.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
