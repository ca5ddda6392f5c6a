"""Listens to a server's events until it is interrupted, and writes them for Perfetto or chrome://tracing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from weft.base.errors import InvalidOption
from weft.cli.client import Client
from weft.cli.trace.spans import Span, TraceSpans


async def listen(url: str, api_key: str | None, out: Path, seconds: float, spans: TraceSpans) -> None:
    client = Client(url, api_key, timeout_seconds=None)
    try:
        async with aclosing(client.stream("/debug/events", None)) as messages:
            await until_interrupted(write(TraceFile(out), spans, messages), seconds)
    finally:
        await client.close()


async def write(file: TraceFile, spans: TraceSpans, messages: AsyncIterator[dict[str, Any]]) -> None:
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
