"""Usage of each key by day: counted, kept through restarts, bounded, and shown to the admin only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.servers.asgi import Exchange, application
from tests.support.servers.backends import in_loop
from weft.base.errors import OptionError
from weft.server.access import usage as usage_module
from weft.server.access.auth import Keys
from weft.server.access.keys import Key
from weft.server.access.rates import Used
from weft.server.access.usage import MOST_DAYS, UsageBook
from weft.server.settings import ServerSettings

DAY = 86400.0
SETTINGS = ServerSettings(api_keys=(Key("one", "alice"), Key("two", "bob")), admin_key="root")


async def usage(app: Any, key: str | None, query: bytes = b"", status: int = 200) -> Any:
    found = await Exchange(app, "/v1/usage", key=key, query_string=query).answer()
    assert found.status == status, found.body
    return found.json


async def complete(app: Any, key: str | None) -> None:
    found = await Exchange(app, "/v1/completions", {"prompt": [5, 6], "max_tokens": 3}, key).answer()
    assert found.status == 200


@in_loop
async def test_the_admin_sees_what_each_key_used_by_day():
    now = [0.0]
    keys = Keys(SETTINGS, usage=UsageBook(None, lambda: now[0]))
    async with application(SETTINGS, keys=keys) as app:
        for key in ("one", "one", "two"):
            await complete(app, key)
        now[0] = DAY
        await complete(app, "two")
        rows = {(row["day"], row["key"]): row for row in (await usage(app, "root"))["data"]}
        first = rows["1970-01-01", "alice"]
        assert (first["requests"], first["prompt_tokens"], first["generated_tokens"]) == (2, 4, 6)
        assert rows["1970-01-01", "bob"]["generated_tokens"] == rows["1970-01-02", "bob"]["generated_tokens"] == 3
        assert "cached_tokens" in first
        later = (await usage(app, "root", b"start=1970-01-02&key=bob"))["data"]
        assert [row["key"] for row in later] == ["bob"]
        assert (await usage(app, "root", b"end=1969-12-31"))["data"] == []
        await usage(app, "root", b"start=yesterday", 400)
        await usage(app, "one", status=403)
        await usage(app, None, status=401)


@in_loop
async def test_usage_is_kept_through_restarts(tmp_path):
    path = str(tmp_path / "usage.json")
    first = UsageBook(path, lambda: 0.0)
    async with first.kept():
        first.note("alice", 1, Used(10, 4, 5))
    again = UsageBook(path, lambda: DAY)
    async with again.kept():
        again.note("alice", 2, Used(1, 0, 1))
    found = UsageBook(path, lambda: DAY).days
    assert found["1970-01-01"]["alice"].prompt_tokens == 10
    assert found["1970-01-02"]["alice"].requests == 2


@in_loop
async def test_saving_encodes_what_has_changed_only_and_outside_the_event_loop(tmp_path, monkeypatch):
    path, now = tmp_path / "usage.json", [0.0]
    book = UsageBook(str(path), lambda: now[0])
    for day in range(30):
        now[0] = day * DAY
        book.note("alice", 1)
    await book.save()
    encoded, threads, encode = [], set(), msgspec.json.encode

    def noted(value: Any) -> bytes:
        threads.add(threading.current_thread())
        encoded.extend([value] if isinstance(value, dict) else [])
        return encode(value)

    monkeypatch.setattr(msgspec.json, "encode", noted)
    before = path.stat().st_ino
    await book.save()
    assert (encoded, path.stat().st_ino) == ([], before)
    book.note("bob", 1, Used(3, 0, 1))
    await book.save()
    assert [list(each) for each in encoded] == [["alice", "bob"]]
    assert threading.main_thread() not in threads
    monkeypatch.undo()
    assert UsageBook(str(path), lambda: 0.0).days == book.days


@in_loop
async def test_usage_that_could_not_be_written_is_written_with_the_next(tmp_path, monkeypatch):
    path = tmp_path / "usage.json"
    book = UsageBook(str(path), lambda: 0.0)

    def fail(path: Path, parts: Any) -> int:
        raise OSError(28, "No space left on device")

    book.note("alice", 1)
    with monkeypatch.context() as patch:
        patch.setattr(usage_module, "write_parts", fail)
        await book.save()
    assert not path.exists()
    await book.save()
    assert UsageBook(str(path), lambda: 0.0).days["1970-01-01"]["alice"].requests == 1


def test_a_damaged_file_is_not_overwritten(tmp_path):
    path = tmp_path / "usage.json"
    path.write_text("{")
    with pytest.raises(OptionError, match="is not a file of usage"):
        UsageBook(str(path), lambda: 0.0)
    assert path.read_text() == "{"
    with pytest.raises(OptionError, match="folder that exists"):
        UsageBook(str(tmp_path / "nowhere" / "usage.json"), lambda: 0.0)


def test_days_are_bounded():
    now = [0.0]
    book = UsageBook(None, lambda: now[0])
    for day in range(MOST_DAYS + 5):
        now[0] = day * DAY
        book.note("alice", 1)
    assert len(book.days) == MOST_DAYS
    assert min(book.days) == "1970-01-06"


def test_a_renamed_key_is_counted_under_its_new_name():
    keys = Keys(SETTINGS, usage=UsageBook(None, lambda: 0.0))
    keys.replace(ServerSettings(api_keys=(Key("one", "carol"), Key("two", "bob")), admin_key="root"))
    tenant = keys.tenant([(b"x-api-key", b"one")])
    assert tenant is not None
    tenant.account.take_request()
    assert [*keys.usage.days["1970-01-01"]] == ["carol"]


@in_loop
async def test_the_page_of_the_document_runs_nothing():
    async with application() as app:
        found = await Exchange(app, "/docs").answer()
        assert found.headers["content-type"].startswith("text/html")
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        text = found.body.decode()
        assert "<script" not in text
        assert "http" not in text.replace("HTTP", "").partition("</style>")[0]
        assert "/v1/chat/completions" in text
        assert "<code>messages</code><td>list of ChatMessage<td>required" in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat"])
def test_built_in_tools_get_a_sentence(path):
    @in_loop
    async def ask() -> None:
        async with application() as app:
            body = {"model": "x", "messages": [], "input": "x", "tools": [{"type": "web_search"}]}
            found = await Exchange(app, path, body).answer()
            assert found.status == 400
            assert b"no tools of its own, such as web search; send tools of the type function" in found.body

    ask()
