"""A server for tests: the tiny model in a thread, HTTP on a real socket of this machine, plain clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from tests.support.clocks import Ticks
from tests.support.models import tiny_model
from tests.support.servers.fake_members import turns
from tests.support.servers.held_steps import SECONDS
from weft.base.options import Options
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.server.app import create_app
from weft.server.front import pool_for
from weft.server.http.connections import bounded_connections
from weft.server.http.listener import bind
from weft.server.settings import ServerSettings
from weft.start.launch import Server, open_stored
from weft.start.thread_backend import ThreadBackend
from weft.text.template import ChatTemplate

T = TypeVar("T")

MEMORY = "16MiB"


class Served:
    """A running server and a client of it."""

    def __init__(
        self, backend: Any, settings: ServerSettings, texts: bool, template: str, start: bool, pool: dict[str, Any]
    ) -> None:
        self.backend = backend
        self.settings = settings
        self._texts = texts
        self._template = template
        self._start_token = start
        self._pool = pool
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(SECONDS), "the server does not come up"
        if self._error is not None:
            raise self._error
        key = self.settings.keys[:1]
        headers = {"authorization": f"Bearer {key[0].secret}"} if key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.backend.start()
        tokenizer = tiny_model.tokenizer() if self._texts else None
        if tokenizer is not None and self._start_token:
            start = tiny_model.SPECIALS[0]
            tokenizer.backend.post_processor = TemplateProcessing(f"{start} $A", special_tokens=[(start, 256)])
        template = ChatTemplate(self._template, tokenizer.specials) if tokenizer else None
        ends = tokenizer.end_tokens if tokenizer else frozenset([257])
        self.pool = pool_for(tokenizer, template, self.settings, **self._pool)
        connections = bounded_connections(self.settings.limits)
        stored = open_stored(self.settings)
        more = {"pool": self.pool, "connections": connections, "stored": stored, "files": self.backend.files}
        self.app = create_app(self.backend, tokenizer, template, ends, self.settings, **more)
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ready = self._ready.set
        self.server = Server(self.app, self.settings, self._drain, lambda _: ready(), connections=connections)
        await self.server.serve(sockets=[listener])
        self.pool.stop()
        if stored is not None:
            stored.close()
        await self.backend.stop(0)

    async def _drain(self) -> None:
        """Leave what runs to the backend's stop."""

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.server.force_exit = True
        self._thread.join(SECONDS)

    # asking -----------------------------------------------------------------------------------------------------------

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something where the server runs."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(SECONDS)

    def post(self, path: str, body: Any, status: int = 200, **more: Any) -> Any:
        answer = self.client.post(path, json=body, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream but the closing mark, which must be there."""
        found = []
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    found.append(line[6:])
        if path != "/v1/responses":
            assert found.pop() == "[DONE]"
        return [json.loads(each) for each in found]

    def chat(self, content: Any = "Hello", status: int = 200, **more: Any) -> Any:
        """One chat turn; greedy and short unless told otherwise."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16, **more}
        return self.post("/v1/chat/completions", body, status)

    def say(self, content: Any = "Hello", **more: Any) -> str:
        return str(self.chat(content, **more)["choices"][0]["message"]["content"])

    def complete(self, prompt: Any = "Once upon", status: int = 200, **more: Any) -> Any:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **more}
        return self.post("/v1/completions", body, status)

    def ids(self, prompt: Any = "Once upon", **more: Any) -> list[int]:
        return list(self.complete(prompt, return_token_ids=True, **more)["choices"][0]["token_ids"])

    def generate(self, text: Any = "Once upon", status: int = 200, sampling: Any = None, **more: Any) -> Any:
        chosen = {"temperature": 0, "max_new_tokens": 8, **(sampling or {})}
        return self.post("/generate", {"text": text, "sampling_params": chosen, **more}, status)

    def stats(self) -> dict[str, Any]:
        return self.on_loop(self.backend.stats)

    def pace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let each step of the engine wait until the tokens before it have left, each on its own."""
        step = Engine.step

        def paced(engine: Engine) -> list[Output]:
            self.on_loop(turns)
            return step(engine)

        monkeypatch.setattr(Engine, "step", paced)


def raw(server: Served, *sent: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as wire:
        for part in sent:
            wire.sendall(part)
        received = b""
        try:
            while part := wire.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


@contextmanager
def posted(server: Served, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A connection on which this was asked for and nothing is read of the answer; the client hangs up at the end."""
    content = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        yield


@contextmanager
def serving(
    settings: ServerSettings | None = None,
    texts: bool = True,
    template: str = tiny_model.TEMPLATE,
    start: bool = False,
    pool: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """`texts`: with a tokenizer, which puts a special token at the start of plain prompts if told to.

    `pool`: how its text workers differ from the usual ones.
    """
    chosen = Options(**{**tiny_model.OPTIONS, "memory": MEMORY, "threads": 1, "max_length": 2048, **options})
    limited = settings or ServerSettings()
    # A busy machine may need long to start a text worker.
    patient = replace(limited.limits, text_seconds=max(SECONDS, limited.limits.text_seconds))
    served = Served(
        ThreadBackend.from_options(chosen, progress=False, now=Ticks()),
        replace(limited, limits=patient),
        texts,
        template,
        start,
        pool or {},
    )
    served.start()
    try:
        yield served
    finally:
        served.stop()
