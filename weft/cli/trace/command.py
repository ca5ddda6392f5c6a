"""`weft trace`: listens to a server's events until it is interrupted, and writes them for Perfetto or chrome://tracing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from weft.base.errors import InvalidOption
from weft.base.options import option
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.cli.trace.spans import Span, Spans

ABOUT = "write what a server's requests and steps do to a file for trace viewers (Perfetto)"


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options of `weft trace`."""

    url: str = argument(
        "URL of a server of Weft's; unix:PATH for a Unix socket; default: http://127.0.0.1:8000",
        default="http://127.0.0.1:8000",
    )
    api_key: str | None = option(
        None, "key of the server; better: WEFT_API_KEY; the admin key shows all requests, and the engine's steps"
    )
    out: str = option("trace.json", "file to write", metavar="PATH")
    seconds: float = option(0.0, "end after this time; 0: when it is interrupted, or with the server")

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise InvalidOption("seconds", f"must not be negative, got {self.seconds}")


def run(options: TraceOptions) -> int:
    from weft.cli.client import Client
    from weft.cli.trace.spans import Spans

    async def listen() -> None:
        client = Client(options.url, options.api_key, timeout_seconds=None)
        try:
            async with aclosing(client.stream("/debug/events", None)) as messages:
                await until_interrupted(write(TraceFile(Path(options.out)), spans, messages), options.seconds)
        finally:
            await client.close()

    spans = Spans()
    asyncio.run(listen())
    lost = f", {spans.lost} lost" if spans.lost else ""
    print(
        f"{spans.events} events and {spans.steps} steps{lost} are in {options.out}; open it at https://ui.perfetto.dev"
    )
    return 0


async def write(file: TraceFile, spans: Spans, messages: AsyncIterator[dict[str, Any]]) -> None:
    """Write spans as they are known, so that whatever ends this leaves a file that can be read."""
    try:
        async for message in messages:
            # The server answers: nothing that was there before is lost to a wrong URL or key.
            file.open()
            file.add(spans.take(message))
    finally:
        file.close(spans.close())


async def until_interrupted(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run until it ends, until a signal comes, or until the time is over."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    # Not every system has handlers in loops. There, an interruption ends the program once the file is whole.
    with suppress(NotImplementedError):
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, task.cancel)
    try:
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(task, seconds or None)
    finally:
        with suppress(NotImplementedError):
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)


class TraceFile:
    """A JSON array of spans. Viewers also read one whose end is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._first = True

    def open(self) -> None:
        if self._file is not None:
            return
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise InvalidOption("out", f"cannot be written: {error.strerror}") from None
        self._file.write(b"[")
        print(f"writing {self._path}; Ctrl-C ends", file=sys.stderr)

    def add(self, spans: Iterable[Span]) -> None:
        import msgspec

        if self._file is None:
            return
        for span in spans:
            self._file.write(b"\n" if self._first else b",\n")
            self._file.write(msgspec.json.encode(span))
            self._first = False
        self._file.flush()

    def close(self, spans: Iterable[Span]) -> None:
        if self._file is not None:
            self.add(spans)
            self._file.write(b"\n]\n")
            self._file.close()
