"""The views beside the chat, in a real browser: the cache, requests, the model; and faults of access in all of them."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest

from tests.support.browser import Watched, axe_script
from tests.support.servers.http_server import Served
from tests.support.servers.page_facts import batch_of, outline_of

pytestmark = pytest.mark.browser


# the cache ------------------------------------------------------------------------------------------------------------


def test_the_cache_changes_with_a_request(watched: Watched):
    watched.settle(detailed=True, Most_tokens="2")
    watched.ask("cache " * 80)
    watched.answered(1)
    watched.view("Cache")
    watched.page.locator(".branch").last.focus()
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector(".details >> text=Tokens 0 to")
    # The tokens of the answer were kept, and so was the answer.
    assert "retained for" in watched.page.locator(".details").inner_text()


def test_of_a_large_cache_only_what_is_visible_is_drawn(watched: Watched):
    counts = []
    for branches in (50, 1000):
        answer = partial(fulfill, outline_of(branches, 200))
        watched.page.route("**/cache/outline", answer)
        watched.view("Cache")
        watched.page.wait_for_selector(".branch")
        counts.append(watched.page.locator(".picture *").count())
        assert 0 < watched.page.locator(".branch").count() < 45
        if branches == 1000:
            assert "The newest 8,192 of 100,000 cells" in watched.page.locator(".note").inner_text()
            print(f"\n{watched.page.evaluate(SCROLL):.0f} frames a second while 1,000 branches are scrolled")
            assert 0 < watched.page.locator(".branch").count() < 45
        watched.view("Chat")
    assert counts[1] <= 1.1 * counts[0]


def fulfill(found: Any, route: Any) -> None:
    route.fulfill(json=found)


SCROLL = """() => new Promise((done) => {
  const box = document.querySelector(".picture"), began = performance.now();
  let frames = 0;
  const frame = () => {
    box.scrollTop += 40;
    if (++frames < 120) requestAnimationFrame(frame);
    else done(1000 * frames / (performance.now() - began));
  };
  requestAnimationFrame(frame);
})"""


# requests -------------------------------------------------------------------------------------------------------------


def report(watched: Watched, **more: Any) -> None:
    """Let the server report what many requests do, and end the stream."""
    batch = batch_of(1000 * time.time(), **more)
    answer = {"body": f"data: {json.dumps(batch)}\n\n", "content_type": "text/event-stream"}
    watched.page.route("**/debug/events", lambda route: route.fulfill(**answer))
    watched.page.route("**/debug/requests/*", lambda route: route.fulfill(json={"id": "x", "answers": []}))


def test_requests_are_lanes_with_a_history(watched: Watched):
    report(watched)
    watched.view("Requests")
    watched.page.wait_for_selector("button.lane >> nth=23")
    assert watched.page.locator(".strips figure").count() == 3
    preempted = watched.page.locator("button.lane:has(path.preempted)")
    preempted.first.click()
    story = watched.page.locator(".details").inner_text()
    for part in (
        "The hit ended at token",
        "waited: ",
        "read prompt tokens",
        "answered",
        "preempted",
        "drafts accepted",
    ):
        assert part in story


def test_of_many_requests_few_elements_are_drawn(watched: Watched):
    report(watched, requests=600, seconds=50.0)
    watched.view("Requests")
    watched.page.wait_for_selector("button.lane >> nth=39")
    assert watched.page.locator("button.lane").count() == 40
    assert "older requests of this time are not drawn" in watched.page.locator(".view").inner_text()
    assert watched.page.locator("*").count() < 1500


def test_the_stream_is_open_only_while_requests_are_looked_at(watched: Watched):
    silent = [False]
    answer = {"body": f"data: {json.dumps(batch_of(1000 * time.time()))}\n\n", "content_type": "text/event-stream"}
    watched.page.route("**/debug/events", lambda route: None if silent[0] else route.fulfill(**answer))
    assert "/debug/events" not in watched.paths
    watched.view("Requests")
    watched.page.wait_for_selector("button.lane")
    # It ended, so the page connects again: this time to a stream that stays open.
    silent[0] = True
    with watched.page.expect_request("**/debug/events") as last:
        pass
    with watched.page.expect_event("requestfailed", lambda request: request == last.value):
        watched.view("Cache")


def test_a_key_without_rights_to_steps_sees_lanes_only(watched: Watched):
    batch = batch_of(1000 * time.time())
    del batch["steps"]
    answer = {"body": f"data: {json.dumps(batch)}\n\n", "content_type": "text/event-stream"}
    watched.page.route("**/debug/events", lambda route: route.fulfill(**answer))
    watched.view("Requests")
    watched.page.wait_for_selector("button.lane")
    assert watched.page.locator(".strips").count() == 0


# access ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_no_serious_fault_in_any_view(browser: Any, served: Served, scheme: str, width: int):
    watched = Watched(browser, served.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    watched.context.add_init_script(axe_script())
    watched.open()
    report(watched)
    faults = audit(watched, "an empty chat")
    watched.settle(detailed=True, Most_tokens="12")
    watched.ask("Hello\n\n" * 40)
    watched.answered(1).get_by_role("button", name="Tokens", exact=True).click()
    watched.page.locator(".token").nth(3).click()
    faults += audit(watched, "tokens")
    watched.page.get_by_role("button", name="2 ways").click()
    watched.page.wait_for_selector(".choices > .facts .bar")
    faults += audit(watched, "answers side by side")
    watched.page.click("summary:has-text('Settings')")
    watched.page.locator(".settings").get_by_role("button", name="curl").click()
    faults += audit(watched, "settings")
    watched.view("Cache")
    watched.page.locator(".branch").first.focus()
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector(".details")
    faults += audit(watched, "the cache")
    watched.view("Requests")
    watched.page.locator("button.lane").first.click()
    faults += audit(watched, "requests")
    watched.view("Model")
    watched.page.wait_for_selector("text=Tokens a second")
    faults += audit(watched, "the model")
    assert faults == []
    watched.close()


def audit(watched: Watched, where: str) -> list[str]:
    """Return the serious and critical faults that axe finds in what is shown now."""
    found = watched.page.evaluate("axe.run(document, { resultTypes: ['violations'] }).then(all => all.violations)")
    return [
        f"{where}: {fault['help']}: {node['html']:.200} {node['failureSummary']:.300}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
