"""Prompts as files over HTTP: what one server sends, another takes, with a signature and for the same key only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.servers.http_server import Served, raw, serving
from tests.support.servers.http_values import LONG, RICH
from weft.base import prefix_keys
from weft.base.prefix_keys import make_key
from weft.cli.main import main
from weft.cli.serve import ServeOptions, settings_of
from weft.server.prefixes import routes
from weft.server.settings import PromptFileSettings, ServerSettings

ONE, TWO, ADMIN = "key-one", "key-two", "key-admin"


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "secret"
    make_key(path)
    return path


@pytest.fixture(scope="module")
def pair(secret: Path):
    """One server that sends, and one that takes and verifies."""
    [key] = prefix_keys.read_prefix_keys("x", str(secret))
    common = ServerSettings(model_name="tiny", api_keys=(ONE, TWO), admin_key=ADMIN, responses_bytes=1 << 20)
    files = {"prefix_key": str(secret), "trusted_prefix_keys": str(secret), "exact": True, "template": RICH}
    sends, takes = PromptFileSettings(key=key), PromptFileSettings(trusted=(key,), share=0.5)
    with serving(replace(common, prompt_files=sends), **files) as first:  # noqa: SIM117
        with serving(replace(common, prompt_files=takes), **files) as second:
            yield first, second


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def respond(served: Served, key: str = ONE, **body):
    asked = {"input": LONG, "temperature": 0, "max_output_tokens": 40, "ignore_eos": True, **body}
    found = served.client.post("/v1/responses", json=asked, headers=bearer(key))
    assert found.status_code == 200, found.text
    return found.json()


def fetch(served: Served, name: str, key: str = ONE, status: int = 200) -> bytes:
    found = served.client.get(f"/v1/prefixes/{name}", headers=bearer(key))
    assert found.status_code == status, found.text
    assert status != 200 or int(found.headers["content-length"]) == len(found.content)
    return found.content


def put(served: Served, data: bytes, status: int = 200, key: str = ADMIN, **query: str):
    found = served.client.post("/v1/prefixes", content=data, params=query, headers=bearer(key))
    assert found.status_code == status, found.text
    return found.json()


def fails(served: Served, data: bytes, status: int, text: str, **more: str) -> None:
    message = put(served, data, status, **more)["error"]["message"]
    assert text in message
    assert "\n" not in message


def test_a_stored_response_goes_on_on_another_server(pair: tuple[Served, Served]) -> None:
    first, second = pair
    made = respond(first)
    data = fetch(first, made["id"])
    found = put(second, data, tenant="key-1")
    assert found["tokens"] == made["usage"]["input_tokens"] + 40
    assert 0 < found["verified_tokens"] <= found["cached_tokens"] <= found["tokens"]
    again = respond(second)
    assert again["output"][0]["content"] == made["output"][0]["content"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 128
    assert respond(second, key=TWO)["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert second.stats()["files"]["loaded"] >= 1


def test_a_retained_prompt_is_sent_until_its_end_and_to_its_key_only(pair: tuple[Served, Served]) -> None:
    first, second = pair
    body = {
        "prompt": LONG + "Retained.",
        "max_tokens": 30,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "pepper",
    }
    made = first.client.post("/v1/completions", json={**body, "retain": 100}, headers=bearer(ONE)).json()
    other = first.client.post("/v1/completions", json=body, headers=bearer(ONE)).json()
    data = fetch(first, made["id"])
    fetch(first, made["id"], TWO, 404)
    fetch(first, made["id"], ADMIN, 404)
    fetch(first, other["id"], ONE, 404)
    fails(second, data, 400, "other units", tenant="key-1")
    assert put(second, data, tenant="key-1", cache_salt="pepper")["cached_tokens"] >= 128
    assert first.client.delete("/cache", params={"tenant": "key-1"}, headers=bearer(ADMIN)).status_code == 200
    fetch(first, made["id"], ONE, 404)


def check_whose(pair: tuple[Served, Served]) -> None:
    first, second = pair
    data = fetch(first, respond(first, input="Whose? " + LONG)["id"])
    for query in ({}, {"tenant": "key-2"}):
        fails(second, data, 403, "another tenant", **query)
    assert respond(second, key=TWO, input="Whose? " + LONG)["usage"]["input_tokens_details"]["cached_tokens"] == 0
    fails(second, data, 403, "needs the admin key", key=ONE)


def test_a_file_is_only_for_the_key_that_sent_it_and_only_the_admin_brings_it(pair: tuple[Served, Served]) -> None:
    check_whose(pair)


def check_signature(pair: tuple[Served, Served]) -> None:
    first, second = pair
    data = fetch(first, respond(first, input=LONG + "Signed.")["id"])
    for changed in (data[:-1] + bytes([data[-1] ^ 1]), data + b"x", data[: len(data) // 2]):
        fails(second, changed, 403, "not signed by a trusted key, or was changed", tenant="key-1")
    fails(second, b"", 400, "too short", tenant="key-1")
    put(second, data, tenant="key-1")


def test_only_signed_files_are_taken(pair: tuple[Served, Served]) -> None:
    check_signature(pair)


def test_a_file_is_bounded_before_it_is_kept(pair: tuple[Served, Served]) -> None:
    _, second = pair
    most = second.backend.info.memory_bytes

    def pieces():
        for _ in range(most // (1 << 20) + 2):
            yield bytes(1 << 20)

    found = second.client.post("/v1/prefixes", content=pieces(), headers=bearer(ADMIN))
    assert found.status_code == 413
    head = f"POST /v1/prefixes HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {ADMIN}\r\nConnection: close\r\n"
    assert b" 413 " in raw(second, head.encode() + b"Content-Length: %d\r\n\r\n" % (most + 1))


def test_wrong_queries_and_servers_without_keys_say_what_is_missing(pair: tuple[Served, Served]) -> None:
    first, second = pair
    fails(second, b"", 400, "query may have tenant and cache_salt", other="1")
    fails(second, b"", 400, "must be the name of a key", tenant="nobody")
    fails(first, b"", 404, "--trusted-prefix-keys")
    assert b"--prefix-key" in fetch(second, "resp_1", ONE, 404)
    assert b"there is no answer" in fetch(first, "resp_1", ONE, 404)
    found = first.client.get("/v1/prefixes/resp_1?choice=x", headers=bearer(ONE))
    assert found.status_code == 400


def test_a_file_counts_until_it_is_sent(pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or clients that read slowly would fill the disk."""
    sends, _ = pair
    name, go, pieces = respond(sends)["id"], threading.Event(), routes.pieces

    async def held(file: BinaryIO) -> AsyncIterator[bytes]:
        yield b""
        await asyncio.to_thread(go.wait)
        async for piece in pieces(file):
            yield piece

    monkeypatch.setattr(routes, "pieces", held)
    with ExitStack() as stack:
        stack.callback(go.set)
        address = f"/v1/prefixes/{name}"
        sent = [
            stack.enter_context(sends.client.stream("GET", address, headers=bearer(ONE)))
            for _ in range(routes.MOST_FILES)
        ]
        assert [each.status_code for each in sent] == [200] * routes.MOST_FILES
        # Not read: if it were sent, it would be held too.
        with sends.client.stream("GET", address, headers=bearer(ONE)) as refused:
            assert refused.status_code == 429
        go.set()
        assert len({each.read() for each in sent}) == 1
    wait_until(lambda: sends.client.get(address, headers=bearer(ONE)).status_code == 200)


def a_route_skips_the_signature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routes, "checked", lambda path, keys: keys[0])


@pytest.mark.parametrize(("plant", "check"), [(a_route_skips_the_signature, check_signature)])
def test_planted_bugs_of_routes_are_caught(plant: Callable, check: Callable, pair, monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(pair)


def test_the_command_line_reads_the_keys(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = settings_of(ServeOptions(prefix_key=str(secret), trusted_prefix_keys=str(secret), verify_import="0.5"))
    assert found.prompt_files.key in found.prompt_files.trusted
    assert found.prompt_files.share == 0.5
    assert main(["serve", "--replicas", "2", "--prefix-key", str(secret)]) == 2
    assert "--replicas must be 1 with --prefix-key" in capsys.readouterr().err
