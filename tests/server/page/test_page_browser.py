"""The page in a real browser, against the built-in model: `pytest -m slow tests/server/page`. Needs Chromium,
Playwright.

pip install playwright    and a Chromium, such as Debian's package
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models import tiny_model
from tests.support.servers.http_server import Served, serving
from tests.support.servers.serving import Served as Started
from tests.support.servers.serving import serving as started
from weft.server.settings import ServerSettings

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "[link](javascript:document.title='owned') ![image](http://192.0.2.1/x.png) \u202e\x1b[31mred <iframe src='//x'>"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ServerSettings(trusted_hosts=())) as found:
        yield found


class Watched:
    """A page, what its console said, and the origins that it asked."""

    def __init__(self, browser: Any, served: Served | Started, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url.split("/")[2]))
        self.url = served.url
        self.page.goto(served.url + "/")

    def ask(self, text: str) -> None:
        self.page.fill(".box textarea", text)
        self.page.press(".box textarea", "Enter")

    def close(self) -> None:
        self.context.close()
        assert self.said == []
        assert self.asked == {self.url.split("/")[2]}


@pytest.fixture
def watched(browser: Any, served: Served) -> Iterator[Watched]:
    found = Watched(browser, served)
    found.page.wait_for_selector(".box textarea")
    yield found
    found.close()


def settle(watched: Watched, **settings: str) -> None:
    watched.page.click("text=Settings")
    for label, value in settings.items():
        watched.page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    watched.page.click("text=Settings")


def test_an_answer_streams_and_its_next_turn_reuses_the_first(watched: Watched):
    settle(watched, Most_tokens="70")
    watched.ask("word " * 70)
    watched.page.wait_for_selector(".message >> nth=1 >> .facts .bar")
    watched.ask("more")
    watched.page.wait_for_selector(".message >> nth=3 >> .facts .bar .reused")
    watched.page.locator(".message").nth(2).get_by_role("button", name="Edit").click()
    watched.page.fill(".editor textarea", "other")
    watched.page.click("text=Save as a branch")
    watched.page.wait_for_selector(".message >> nth=3 >> .facts .bar .reused")
    assert "2 / 2" in watched.page.locator(".message").nth(2).inner_text()
    watched.page.locator(".message").nth(2).get_by_label("Previous branch").click()
    assert "more" in watched.page.locator(".message").nth(2).inner_text()


def test_stop_ends_an_answer(watched: Watched):
    settle(watched, Most_tokens="1500")
    watched.ask("go on")
    watched.page.wait_for_selector(".message.assistant .markdown:not(:empty)")
    watched.page.click("text=Stop")
    watched.page.wait_for_selector("text=Stopped after")
    assert watched.page.get_by_role("button", name="Send").is_visible()


def test_a_token_is_where_another_answer_begins(watched: Watched):
    settle(watched, Most_tokens="8")
    watched.page.click("text=Settings")
    watched.page.check(".settings input[type=checkbox]")
    watched.page.click("text=Settings")
    watched.ask("hello")
    watched.page.locator(".message").nth(1).get_by_role("button", name="Tokens", exact=True).click()
    tokens = watched.page.locator(".token").all_inner_texts()
    watched.page.locator(".token").nth(2).click()
    other = watched.page.locator(".alternatives button code").nth(1).inner_text()
    watched.page.locator(".alternatives button").nth(1).click()
    watched.page.wait_for_selector("text=2 / 2")
    watched.page.wait_for_selector(".message >> nth=1 >> .facts .bar")
    assert other not in tokens[2:3]


def test_the_cache_changes_with_a_request(watched: Watched):
    settle(watched, Most_tokens="2")
    watched.ask("cache " * 80)
    watched.page.wait_for_selector(".message >> nth=1 >> .facts .bar")
    watched.page.click("nav >> text=Cache")
    watched.page.wait_for_selector(".branch")
    watched.page.locator(".branch").first.click()
    watched.page.wait_for_selector(".details h3")


def test_a_thousand_branches_draw_only_what_is_visible(watched: Watched):
    branches = [
        {
            "name": f"{number:016x}", "parent": None, "from": 0, "to": 6400, "hits": 1, "running": 0, "age": 1,
            "points": [{"tokens": 6400, "origin": "prompt_end", "hits": 1}], "tenant": None, "tier": "device",
        }
        for number in range(1000)
    ]  # fmt: skip
    cells = {"device": {"held": 100_000, "shown": 8192}}
    body = json.dumps({"cell_tokens": 64, "clock": 9, "cells": cells, "branches": branches})
    watched.page.route("**/cache/outline", lambda route: route.fulfill(body=body, content_type="application/json"))
    watched.page.click("nav >> text=Cache")
    watched.page.wait_for_selector(".branch")
    assert 0 < watched.page.locator(".branch").count() < 60


def test_what_a_model_says_is_inert(watched: Watched):
    chunk = {
        "id": "x",
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": HOSTILE}, "finish_reason": "stop"}],
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in (chunk, {"choices": [], "usage": usage}))
    answer = {"body": stream + "data: [DONE]\n\n", "content_type": "text/event-stream"}
    watched.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    watched.ask("attack")
    watched.page.wait_for_selector(".message >> nth=1 >> .facts .bar")
    message = watched.page.locator(".message").nth(1)
    assert watched.page.title() == "Weft"
    for name in ("script", "img", "iframe", "a"):
        assert message.locator(f".markdown {name}").count() == 0
    assert "<script>" in message.inner_text()
    assert "\u202e" not in message.inner_text()


def test_a_server_with_keys_asks_for_one_and_keeps_it_nowhere(browser: Any):
    with serving(ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key")) as locked:
        watched = Watched(browser, locked)
        watched.page.fill("input[type=password]", "wrong")
        watched.page.click("text=Sign in")
        watched.page.wait_for_selector("text=does not know this key")
        watched.page.fill("input[type=password]", "second-key")
        watched.page.click("text=Sign in")
        watched.page.wait_for_selector(".box textarea")
        assert watched.context.cookies() == []
        assert "key" not in watched.page.url
        watched.page.click("nav >> text=Server")
        watched.page.wait_for_selector("text=with the admin key only")
        watched.page.reload()
        watched.page.wait_for_selector("input[type=password]")
        # Answers of 401 and 403 are the only errors that the console shows.
        assert all("401" in text or "403" in text for text in watched.said)
        watched.said.clear()
        watched.close()


def test_one_of_several_models_is_chosen_from_a_list(browser: Any):
    given = ["--weights", "dummy", "--memory", "64MiB", "--threads", "1", "--port", "0", "--models-memory", "2GiB"]
    models = [word for name in "ab" for word in ("--model", f"{name}={tiny_model.FOLDER}")]
    with started(options=[*given, *models]) as two:
        watched = Watched(browser, two)
        watched.page.wait_for_selector(".box textarea")
        watched.page.select_option("select.model", "b")
        settle(watched, Most_tokens="4")
        watched.ask("hello")
        watched.page.wait_for_selector(".message >> nth=1 >> .facts .bar")
        for view in ("Server", "Cache"):
            watched.page.click(f"nav >> text={view}")
            watched.page.wait_for_selector("h2:has-text('b')" if view == "Server" else "text=Cached prefixes")
        states = {each["id"]: each["state"] for each in two.call("/v1/models")[1]["data"]}
        assert states == {"a": "idle", "b": "loaded"}
        watched.close()
