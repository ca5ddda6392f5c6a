"""One line in the log for every request: who asked for what, what it took and how it ended; never what was said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.servers.access_lines import FIELDS, NAMED, lines, shown
from tests.support.servers.asgi import Exchange, PacedEngine, application
from tests.support.servers.fake_engines import POISON
from tests.support.servers.serving import serving
from weft.base.logs import JsonLines, TextLines
from weft.server.access.keys import Key
from weft.server.access_log import METHODS
from weft.server.apis.openai_completions import Completion
from weft.server.settings import Limits, ServerSettings

PROMPT = [100, 101, 102]


@pytest.fixture(autouse=True)
def _informed(caplog):
    caplog.set_level(logging.INFO, "weft")


def completion(app: Any, key: str | None = None, headers: Any = (), **body: Any) -> Exchange:
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **body}
    return Exchange(app, "/v1/completions", body, key, headers=list(headers))


def test_a_line_says_who_asked_for_what_and_what_it_took(caplog):
    async def ask() -> None:
        async with application(NAMED) as app:
            asked = await completion(app, "secret").answer()
            assert asked.status == 200
            assert asked.headers["x-request-id"] == lines(caplog)[0]["id"]

    asyncio.run(ask())
    [line] = lines(caplog)
    assert list(line) == FIELDS
    known = {"key": "bob", "client": "192.0.2.7", "method": "POST", "route": "/v1/completions", "status": 200}
    known |= {"tokens_in": 3, "tokens_cached": 0, "tokens_out": 5, "end": "length"}
    assert line.items() >= known.items()
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_stream_is_one_line_when_it_is_over(caplog, path):
    engine = PacedEngine()
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    if path == "/generate":
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}

    async def ask() -> None:
        async with application(engine=engine) as app:
            asked = Exchange(app, path, body)
            running = asked.start()
            engine.allow(1)
            await asked.until(b"data: {")
            assert lines(caplog) == []
            engine.free()
            await running
            assert asked.headers["x-request-id"]
            assert len(asked.messages) > 2

    asyncio.run(ask())
    [line] = lines(caplog)
    assert (line["status"], line["tokens_in"], line["tokens_out"], line["end"]) == (200, 3, 200, "length")


def test_a_client_that_leaves_a_stream_is_logged_with_what_it_got(caplog):
    engine = PacedEngine()

    async def ask() -> None:
        async with application(engine=engine) as app:
            asked = completion(app, stream=True, max_tokens=100)
            running = asked.start()
            engine.allow(1)
            await asked.until(b"data: {")
            asked.leave()
            await running

    asyncio.run(ask())
    [line] = lines(caplog)
    assert (line["status"], line["tokens_out"], line["end"]) == (200, 1, "disconnect")
    assert line["first_token_ms"] is not None


def test_a_client_that_leaves_before_its_answer_is_logged(caplog):
    async def ask() -> None:
        async with application(engine=PacedEngine()) as app:
            asked = completion(app)
            asked.leave()
            await asked.answer()

    asyncio.run(ask())
    [line] = lines(caplog)
    assert (line["status"], line["tokens_in"], line["tokens_out"], line["end"]) == (499, 3, 0, "disconnect")


def test_aborts_and_errors_of_the_engine_are_told_apart(caplog):
    engine = PacedEngine()

    async def ask() -> None:
        async with application(engine=engine) as app:
            asked = completion(app, stream=True, max_tokens=100)
            running = asked.start()
            engine.allow(1)
            await asked.until(b"data: {")
            aborting = await Exchange(app, "/abort_request", {"abort_all": True}).answer()
            assert aborting.json == {"aborted": 1}
            engine.free()
            await running
            failing = await completion(app, prompt=[POISON], stream=True).answer()
            assert failing.status == 200
            await completion(app, prompt=[POISON]).answer()

    asyncio.run(ask())
    found = [(line["route"], line["status"], line["end"]) for line in lines(caplog)]
    stream = "/v1/completions"
    assert found == [
        ("/abort_request", 200, None),
        (stream, 200, "abort"),
        (stream, 200, "error"),
        (stream, 503, "error"),
    ]


def test_several_answers_count_their_prompt_once(caplog):
    async def ask() -> None:
        async with application() as app:
            await completion(app, n=3).answer()
            await completion(app, prompt=[PROMPT, [5]], n=2).answer()

    asyncio.run(ask())
    assert [(line["tokens_in"], line["tokens_out"]) for line in lines(caplog)] == [(3, 15), (4, 20)]


def test_refused_requests_are_logged_and_their_answers_have_an_id(caplog):
    settings = ServerSettings(api_keys=(Key("sesame", "alice"),), limits=Limits(header_bytes=1000))

    async def ask() -> list[Exchange]:
        async with application(settings) as app:
            return [
                await Exchange(app, "/v1/models").answer(),
                await Exchange(app, "/v1/models", key="wrong").answer(),
                await Exchange(app, "/nowhere", key="sesame").answer(),
                await Exchange(app, "/v1/models/other", key="sesame").answer(),
                await completion(app, "sesame", temperature=-1).answer(),
                await Exchange(app, "/health", headers=[(b"x", b"x" * 1001)]).answer(),
                await Exchange(app, "/health", headers=[(b"origin", b"http://evil")]).answer(),
                await Exchange(app, "/health").answer(),
            ]

    asked = asyncio.run(ask())
    found = lines(caplog)
    assert [each.headers["x-request-id"] for each in asked] == [line["id"] for line in found]
    assert [each.status for each in asked] == [line["status"] for line in found]
    assert [(line["status"], line["key"], line["end"]) for line in found] == [
        (401, None, "error"),
        (401, None, "error"),
        (404, "alice", "error"),
        (404, "alice", "error"),
        (400, "alice", "error"),
        (431, None, "error"),
        (403, None, "error"),
        (200, None, None),
    ]
    routes = ["/v1/models", "/v1/models", "other", "/v1/models/{name}", "/v1/completions", *["/health"] * 3]
    assert [line["route"] for line in found] == routes


def test_a_clients_own_id_is_taken_if_it_is_harmless(caplog):
    good = [b"job-7", b"a" * 128, b"550e8400-e29b-41d4-a716-446655440000", b"x.y:z_1"]
    bad = [b"", b"a" * 129, b"a b", b"a\nb", b"a\x1b[31m", b'"', b"\xff", b"id=1"]

    async def ask() -> list[str]:
        async with application() as app:
            asked = [Exchange(app, "/health", headers=[(b"x-request-id", each)]) for each in good + bad]
            return [(await each.answer()).headers["x-request-id"] for each in asked]

    ids = asyncio.run(ask())
    assert ids == [line["id"] for line in lines(caplog)]
    assert ids[: len(good)] == [each.decode() for each in good]
    made = ids[len(good) :]
    assert all(len(each) == 32 and each.isalnum() for each in made)
    assert len(set(made)) == len(bad)


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()], ids=["text", "json"])
def test_nothing_that_a_client_writes_forges_a_line_or_is_shown(caplog, formatter):
    evil = "x\n2026-01-01T00:00:00.000Z INFO weft.access: request key=alice\x1b[2K\u2028\x9b"

    async def ask() -> None:
        async with application(NAMED) as app:
            for key in ("sesame", evil, None):
                await Exchange(app, f"/v1/{evil}", key=None, headers=header(key), method="GET").answer()
                await Exchange(app, "/v1/models", headers=header(key), method=evil).answer()
                await Exchange(app, "/v1/models", headers=header(key), client=(evil, 1)).answer()
                await Exchange(app, "/v1/completions", {"prompt": evil, "user": evil}, headers=header(key)).answer()

    def header(key: str | None) -> list[tuple[bytes, bytes]]:
        found = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        return [*found, (b"x-request-id", evil.encode()), (b"user-agent", evil.encode())]

    asyncio.run(ask())
    text = shown(caplog, formatter)
    assert len(lines(caplog)) == len(text.splitlines()) == 12
    assert "sesame" not in text
    assert all(each.isprintable() for each in text.splitlines())
    assert {line["route"] for line in lines(caplog)} == {"other", "/v1/models", "/v1/completions"}
    assert {line["method"] for line in lines(caplog)} <= {*METHODS, "other"}
    # The client's address comes from the socket, so it may stand there, escaped.
    assert text.count("2026-01-01T00") == 3


def test_keys_and_prompts_are_in_no_line_of_the_log(caplog):
    async def ask() -> None:
        async with application(NAMED) as app:
            await completion(app, "sesame", prompt=[123, 231, 132], stream=True).answer()
            await completion(app, "root-key", prompt=[123, 231, 132]).answer()
            await completion(app, "sesame-not", prompt=[123, 231, 132]).answer()

    asyncio.run(ask())
    assert [line["key"] for line in lines(caplog)] == ["alice", "admin", None]
    for formatter in (TextLines(), JsonLines()):
        text = shown(caplog, formatter)
        assert not any(secret in text for secret in ("sesame", "root-key", "Bearer"))
        # One number alone may be part of a time.
        assert not re.search(r"123\W+231", text)


def test_the_traceback_of_an_internal_error_names_its_request(caplog, monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    async def broken_events(*_: Any) -> AsyncIterator[bytes]:
        raise ZeroDivisionError
        yield b""

    monkeypatch.setattr(Completion, "answer", broken)
    monkeypatch.setattr(Completion, "events", broken_events)

    async def ask() -> list[Exchange]:
        async with application() as app:
            return [await completion(app).answer(), await completion(app, stream=True).answer()]

    asked = asyncio.run(ask())
    assert [each.status for each in asked] == [500, 200]
    assert all(b"internal error" in each.body for each in asked)
    text = shown(caplog, TextLines())
    for each in asked:
        assert f"\n  request {each.headers['x-request-id']}\n" in text
    assert text.count("\n  ZeroDivisionError\n") == 2


def test_preflights_of_browsers_are_logged_and_pages_may_read_the_id(caplog):
    origin = (b"origin", b"https://good.example")
    asks = [origin, (b"access-control-request-method", b"POST")]

    async def ask() -> list[Exchange]:
        async with application(ServerSettings(api_keys=("k",), cors_origins=("https://good.example",))) as app:
            preflight = await Exchange(app, "/v1/completions", headers=asks, method="OPTIONS").answer()
            return [preflight, await Exchange(app, "/v1/models", headers=[origin]).answer()]

    preflight, refused = asyncio.run(ask())
    assert (preflight.status, refused.status) == (200, 401)
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert [line["id"] for line in lines(caplog)] == [each.headers["x-request-id"] for each in (preflight, refused)]


def test_requests_are_not_logged_if_so_told_but_keep_their_ids(caplog):
    async def ask() -> Exchange:
        async with application(ServerSettings(log_requests=False)) as app:
            return await completion(app, headers=[(b"x-request-id", b"mine")]).answer()

    assert asyncio.run(ask()).headers["x-request-id"] == "mine"
    assert lines(caplog) == []


# the form of all lines ------------------------------------------------------------------------------------------------


def written(formatter: logging.Formatter, log: Any) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("weft.test")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


def failing(logger: logging.Logger) -> None:
    try:
        raise ValueError("bad\n2026-01-01T00:00:00.000Z INFO weft: forged\x1b[0m")
    except ValueError:
        logger.exception("a request\nfailed")


def test_text_has_a_time_a_level_and_escaped_controls():
    text = written(TextLines(), lambda log: log.warning("a %s b", "\r\n\x00\x7f\u2029\ud800é"))
    time, level, rest = text.split(" ", 2)
    assert len(time) == len("2026-01-31T12:00:00.000Z")
    assert time.endswith("Z")
    assert (level, rest) == ("WARNING", "weft.test: a \\x0d\\x0a\\x00\\x7f\\u2029\\ud800é b\n")


def test_a_traceback_cannot_forge_a_line_of_text():
    first, *rest = written(TextLines(), failing).splitlines()
    assert first.endswith("ERROR weft.test: a request\\x0afailed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_json_is_an_object_a_line_whatever_is_logged():
    text = written(JsonLines(), lambda log: (log.info("a %s", "\n\ud800"), failing(log)))
    first, second = map(json.loads, text.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "weft.test", "a \n\ud800")
    assert second["traceback"].startswith("Traceback")
    assert text.isascii()


@pytest.mark.thorough
def test_a_server_with_json_logs_writes_nothing_else_and_its_first_lines_as_ever():
    with serving("--log-format", "json", "--host", "0.0.0.0", "--max-length", "40000") as served:
        assert served.call("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})[0] == 200
        assert served.stop() == 0
        found = [json.loads(line) for line in served.errors.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in found)
    # From both processes: the engine warns of the length.
    assert any("max_length is 40000" in line["message"] for line in found)
    [request] = [line for line in found if line["logger"] == "weft.access"]
    assert (request["route"], request["status"], request["tokens_out"]) == ("/v1/completions", 200, 3)
    assert len(served.lines) == 5


@pytest.mark.thorough
def test_disable_log_requests_as_other_servers_spell_it_works():
    with serving("--disable-log-requests", "--in-process") as served:
        assert served.call("/health")[0] == 200
        assert served.stop() == 0
        assert "weft.access" not in served.errors.read_text()
