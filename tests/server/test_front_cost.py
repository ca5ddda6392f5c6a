"""The front's work for each streamed token, counted in Python calls: it does not grow unnoticed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import starlette

import weft
from benchmarks.http import LockstepBackend
from tests.support.models import tiny_model
from weft.server.app import create_app
from weft.server.http.exchange import HttpExchange
from weft.server.settings import ServerSettings
from weft.text.template import ChatTemplate

FEW, MANY = 100, 300
COUNTED = tuple(str(Path(package.__file__).parent) for package in (weft, starlette))
BODIES = {
    "/v1/completions": {"prompt": "x" * 40},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}]},
}


class CountingWire:
    """A connection whose client reads at once."""

    write_paused = False
    default_headers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append

    async def writable(self) -> None: ...

    def body_taken(self) -> None: ...

    def answered(self) -> None: ...

    def abandoned(self, answer_begun: bool) -> None: ...


async def python_calls(path: str, tokens: int) -> tuple[int, int]:
    """Return how often a streamed answer enters or resumes functions of Weft and its libraries, and its chunks.

    The event loop is another one in production, and the engine is the test's own.
    """
    backend, tokenizer = LockstepBackend(), tiny_model.tokenizer()
    await backend.start()
    template = ChatTemplate(tiny_model.TEMPLATE, tokenizer.specials)
    app = create_app(backend, tokenizer, template, frozenset(), ServerSettings())
    wire, calls = CountingWire(), 0
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "client": ("192.0.2.7", 1234),
        "headers": [(b"host", b"here")],
        "http_version": "1.1",
        "state": {},
    }
    exchange = HttpExchange(wire, scope, app, True, False)
    body = {**BODIES[path], "max_tokens": tokens, "stream": True}
    exchange.feed(msgspec.json.encode(body))
    exchange.end_body()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(COUNTED)

    sys.setprofile(count)
    try:
        await exchange.run()
    finally:
        sys.setprofile(None)
    await backend.stop(0)
    return calls, len(wire.written)


@pytest.mark.parametrize(
    ("path", "most"), [("/v1/completions", 25), ("/v1/chat/completions", 32), ("/v1/messages", 37)]
)
def test_a_streamed_token_costs_few_calls(path, most):
    few, few_chunks = asyncio.run(python_calls(path, FEW))
    many, many_chunks = asyncio.run(python_calls(path, MANY))
    assert many_chunks - few_chunks == pytest.approx(MANY - FEW, abs=10), "every token is a chunk"
    per_token = (many - few) / (MANY - FEW)
    assert per_token <= most
