"""Comments in silent streams: sent after a silence and only then, skipped by clients, never behind an answer's end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.support.servers.asgi import Exchange, PacedEngine, application
from tests.support.servers.held_steps import SECONDS, HeldSteps, wait_until
from tests.support.servers.http_server import serving
from weft.cli.client import Client
from weft.server.http.sse import DONE, KEEP_ALIVE, EventStream, Silence
from weft.server.settings import ServerSettings


class Sleeper:
    """A clock and its sleep: time moves when the test says so, and every sleep is remembered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self._wake: asyncio.Future[None] | None = None
        self._asleep = asyncio.Event()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._wake = asyncio.get_running_loop().create_future()
        self._asleep.set()
        await self._wake

    async def asleep(self) -> None:
        async with asyncio.timeout(SECONDS):
            await self._asleep.wait()

    async def pass_time(self, seconds: float) -> None:
        """Wake the sleeper that much later, and wait until it sleeps again."""
        await self.asleep()
        self.wake(seconds)
        await self.asleep()

    def wake(self, seconds: float) -> None:
        self.now += seconds
        self._asleep.clear()
        assert self._wake is not None
        self._wake.set_result(None)


class Stream:
    """An event stream whose events, client and clock are in the test's hands."""

    def __init__(self) -> None:
        self.time = Sleeper()
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.pending: list[bytes] = []
        self.ends: list[str] = []
        self.closed = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()
        self._progress = asyncio.Event()
        silence = Silence(15.0, self.time.clock, self.time.sleep)
        self.response = EventStream(self._produced(), self._close, silence=silence, ended=self.ends.append)

    async def _produced(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            yield event

    def _close(self) -> None:
        self.closed += 1

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] != "http.response.body":
            return
        self.pending.append(message["body"])
        self._progress.set()
        try:
            await self.reads.wait()
            self.sent.append(message["body"])
        finally:
            self.pending.remove(message["body"])
            self._progress.set()

    def start(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.response({}, self._receive, self._send))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._progress.clear()
                await self._progress.wait()


def test_a_comment_is_sent_after_a_silence_and_again_after_the_next():
    async def watch() -> None:
        stream = Stream()
        running = stream.start()
        await stream.time.pass_time(14.0)
        assert stream.sent == []
        await stream.time.pass_time(1.0)
        await stream.time.pass_time(15.0)
        assert stream.sent == [KEEP_ALIVE] * 2
        # An event begins the silence anew: 5 s of it are over when the sleep ends.
        stream.time.now += 10
        stream.events.put_nowait(b"data: 1\n\n")
        await stream.until(lambda: stream.sent == [KEEP_ALIVE, KEEP_ALIVE, b"data: 1\n\n"])
        await stream.time.pass_time(5.0)
        assert stream.time.slept == [15.0, 1.0, 15.0, 15.0, 10.0]
        await stream.time.pass_time(10.0)
        stream.events.put_nowait(None)
        await running
        assert stream.sent == [KEEP_ALIVE, KEEP_ALIVE, b"data: 1\n\n", KEEP_ALIVE, DONE]
        assert (stream.ends, stream.closed) == ([], 1)

    asyncio.run(watch())


def test_no_comment_is_sent_to_a_client_that_does_not_read():
    async def watch() -> None:
        stream = Stream()
        running = stream.start()
        await stream.time.asleep()
        stream.reads.clear()
        stream.events.put_nowait(b"data: 1\n\n")
        await stream.until(lambda: stream.pending == [b"data: 1\n\n"])
        for _ in range(3):
            await stream.time.pass_time(15.0)
        assert stream.pending == [b"data: 1\n\n"]
        stream.reads.set()
        await stream.until(lambda: stream.sent == [b"data: 1\n\n"])
        stream.events.put_nowait(None)
        await running
        assert stream.sent == [b"data: 1\n\n", DONE]

    asyncio.run(watch())


def test_nothing_follows_the_end_even_if_a_comment_was_on_its_way():
    async def watch() -> None:
        stream = Stream()
        running = stream.start()
        await stream.time.asleep()
        stream.reads.clear()
        stream.time.wake(15.0)
        await stream.until(lambda: stream.pending == [KEEP_ALIVE])
        stream.events.put_nowait(None)
        await stream.until(lambda: stream.pending == [DONE])
        stream.reads.set()
        await running
        assert stream.sent == [DONE]

    asyncio.run(watch())


def test_a_client_that_leaves_in_a_silence_ends_its_stream_at_once():
    async def watch() -> None:
        stream = Stream()
        running = stream.start()
        await stream.time.pass_time(15.0)
        stream.left.set()
        await running
        assert stream.sent == [KEEP_ALIVE]
        assert stream.ends == ["disconnect"]
        assert stream.closed >= 1
        assert len(asyncio.all_tasks()) == 1, "the task that sends comments has ended"

    asyncio.run(watch())


def test_without_seconds_no_comment_is_ever_sent():
    async def watch() -> None:
        time = Sleeper()
        sent: list[Any] = []
        await Silence(0.0, time.clock, time.sleep).fill(sent.append)  # type: ignore[arg-type]
        assert (sent, time.slept) == ([], [])

    asyncio.run(watch())


def test_tokens_cost_no_sleep_and_no_task():
    """However many events a stream has, its commenter wakes by the clock alone."""
    engine = PacedEngine()
    engine.free()

    async def ask() -> Exchange:
        async with application(ServerSettings(keep_alive_seconds=3600.0), engine) as app:
            body = {"prompt": [1], "max_tokens": 500, "ignore_eos": True, "stream": True}
            made, factory = [], asyncio.Task
            loop = asyncio.get_running_loop()
            loop.set_task_factory(lambda loop, work, **more: made.append(work) or factory(work, loop=loop, **more))
            found = await Exchange(app, "/v1/completions", body).answer()
            loop.set_task_factory(None)
            assert len(made) < 10
            return found

    assert asyncio.run(ask()).body.endswith(DONE)


# with clients ---------------------------------------------------------------------------------------------------------


def silent_stream(monkeypatch, ask: Any) -> Any:
    """What a client makes of a stream that was silent before its first token, for at least three comments."""
    held, comments, fill = HeldSteps(monkeypatch), [], Silence.fill

    async def counted(silence: Silence, send: Any) -> None:
        async def counting(message: Any) -> None:
            await send(message)
            comments.append(message)

        await fill(silence, counting)

    monkeypatch.setattr(Silence, "fill", counted)
    with serving(ServerSettings(keep_alive_seconds=0.001)) as server:
        held.hold()
        found: list[Any] = []
        client = threading.Thread(target=lambda: found.append(ask(server)))
        client.start()
        try:
            held.wait_held()
            wait_until(lambda: len(comments) >= 3 or not client.is_alive())
        finally:
            held.release()
        client.join(SECONDS)
        assert found, "the client did not survive a comment"
        wait_until(lambda: not server.backend.open)
        return found[0]


BODY = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def test_openais_client_skips_comments(monkeypatch):
    # Its import takes seconds.
    import openai

    def ask(server: Any) -> list[Any]:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        body = {**BODY, "extra_body": {"ignore_eos": BODY["ignore_eos"]}}
        del body["ignore_eos"]
        return list(client.completions.create(model="tiny", stream=True, **body))

    chunks = silent_stream(monkeypatch, ask)
    assert chunks
    assert all(chunk.object == "text_completion" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openais_client_of_responses_skips_comments(monkeypatch):
    import openai

    def ask(server: Any) -> list[str]:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.responses.create(model="tiny", input="Hello", max_output_tokens=4, stream=True)
        return [event.type for event in stream]

    kinds = silent_stream(monkeypatch, ask)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_our_own_client_skips_comments(monkeypatch):
    async def follow(url: str) -> list[Any]:
        client = Client(url)
        found = [event async for event in client.stream("/v1/completions", {**BODY, "stream": True})]
        await client.close()
        return found

    events = silent_stream(monkeypatch, lambda server: asyncio.run(follow(server.url)))
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_comments_come_before_the_first_token_on_the_wire(monkeypatch):
    raw = silent_stream(
        monkeypatch, lambda server: server.client.post("/v1/completions", json={**BODY, "stream": True}).content
    )
    assert raw.startswith(KEEP_ALIVE * 3)
    data = [line for line in raw.split(b"\n\n") if line and line + b"\n\n" != KEEP_ALIVE]
    assert all(line.startswith(b"data: ") for line in data)
    assert json.loads(data[0][6:])["object"] == "text_completion"
