"""Text of clients and proxies in log lines: it adds no line, and no field to a line."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from tests.support.servers.access_lines import FIELDS, NAMED
from tests.support.servers.asgi import Exchange, application
from tests.support.servers.held_steps import wait_until
from tests.support.servers.wire_server import get, json_of, wire_server
from weft.base.errors import OptionError
from weft.base.logs import TextLines
from weft.server.access.keys import Key
from weft.server.http.addresses import parse
from weft.server.settings import ServerSettings

FORGED = 'x status=200 key=admin end="stop'
FIELD = re.compile(r' (\w+)=(?:"(?:[^"\\]|\\.)*"|[^\s"]+)')


def requests(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of requests, as they are written."""
    lines = [TextLines().format(record) for record in caplog.records if record.name == "weft.access"]
    return [line.partition(" request")[2] for line in lines]


def names(line: str) -> list[str]:
    """Return the names of the fields of a line that consists of fields alone."""
    assert FIELD.sub("", line) == "", line
    return FIELD.findall(line)


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-For: fe80::1%{}",
        "X-Forwarded-For: [fe80::1%{}]:80",
        "X-Forwarded-For: [fe80::1]{}",
        "X-Forwarded-For: 9.9.9.9:{}",
        "X-Forwarded-For: 9.9.9.9 {}",
        "X-Forwarded-For: {}",
        "X-Forwarded-For: 9.9.9.9, {}",
        "X-Forwarded-Proto: {}",
        "X-Request-Id: {}",
        "User-Agent: {}",
        "Referer: {}",
        "Authorization: {}",
        "X-Api-Key: {}",
    ],
)
def test_no_header_adds_a_field_to_the_line_of_its_request(caplog, header):
    caplog.set_level(logging.INFO, "weft")
    settings = ServerSettings(trusted_proxies=("127.0.0.1",))
    with wire_server(settings=settings) as server:
        seen = json_of(server.ask(get("/", "1.1", header.format(FORGED), "Connection: close")))
        assert seen["client"][0] == "127.0.0.1"
        wait_until(lambda: requests(caplog))
    [line] = requests(caplog)
    assert names(line) == FIELDS
    assert "admin" not in line


@pytest.mark.parametrize(
    "asked",
    [
        {"path": f"/v1/{FORGED}"},
        {"path": f"/v1/models/{FORGED}"},
        {"path": "/v1/models", "method": FORGED},
        {"path": "/v1/models", "client": (FORGED, 1)},
        {"path": "/v1/completions", "body": {"prompt": [1], "model": FORGED}},
        {"path": "/v1/completions", "body": {"prompt": [1], "user": FORGED, "max_tokens": 1}},
        {"path": "/v1/completions", "body": {"prompt": [1], FORGED: 1, "max_tokens": 1}},
    ],
    ids=str,
)
def test_nothing_in_a_request_adds_a_field_to_a_line(caplog, asked):
    caplog.set_level(logging.INFO, "weft")

    async def ask() -> None:
        async with application(NAMED) as app:
            await Exchange(app, key="sesame", **asked).answer()

    asyncio.run(ask())
    [line] = requests(caplog)
    assert names(line) == FIELDS
    others = [TextLines().format(record) for record in caplog.records if record.name != "weft.access"]
    # The name of an unknown field is quoted: outside of quotes there is none of it.
    assert not any("admin" in re.sub(r"'[^']*'", "", each) for each in others)


def test_names_of_keys_are_plain_words():
    with pytest.raises(OptionError, match="a key's name must"):
        Key("sesame", FORGED)


@pytest.mark.parametrize(
    "text", ["fe80::1%eth0", "::1%", "[::1", "::1]", "[::1]x", "1.2.3.4:", "1.2.3.4:x", "1.2.3", ""]
)
def test_what_is_no_plain_address_is_none(text):
    assert parse(text) is None
