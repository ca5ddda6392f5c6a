"""Photographs every view of the page: light, dark, and at the width of a phone.

    python -m release.screenshots [--out FOLDER] [--url URL] [--only light] [--views chat,cache]

A server of the built-in model is started for it, and asked by other clients meanwhile, unless `--url` names one. It
needs Chromium and Playwright (CONTRIBUTING.md). The pictures that README and docs show are in docs/.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.browser import Watched, chromium, missing

ROOT = Path(__file__).parents[1]
WIDE, NARROW = {"width": 1200, "height": 760}, {"width": 390, "height": 800}
SHAPES: dict[str, dict[str, Any]] = {
    "light": {"viewport": WIDE, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "phone": {
        "viewport": NARROW,
        "color_scheme": "light",
        "is_mobile": True,
        "has_touch": True,
        "device_scale_factor": 2,
    },
}
RULES = (
    "You tell short stories for children. Each has one animal, one problem and a friend who helps. Use plain words. "
    "Begin with when and where it was, and end with what the animal learned. Never frighten anyone. " * 2
)
QUESTIONS = ("Tell me a story about a fox who wants to weave.", "And now one about her friend, the owl.")
OTHERS = [f"{RULES} Write about the {animal}." for animal in ("hare", "mole", "wren", "toad", "otter", "crane")]


@contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    options = ["--port", "0", "--threads", "1", "--memory", "96MiB", "--log-level", "warning"]
    command = [sys.executable, "-m", "weft", "serve", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        # The address is the last of the first lines.
        yield next(line.split()[-1] for line in process.stdout if line.split()[-1:][0].startswith("http"))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


class Others:
    """Other clients, who ask one after the other until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        while not self._stopped.is_set():
            number += 1
            body = {"max_tokens": 24 + 40 * (number % 4), "messages": [{"role": "user", "content": OTHERS[number % 6]}]}
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(), headers)
            urllib.request.urlopen(request).read()
            self._stopped.wait(0.4 * (number % 3))


# the views ------------------------------------------------------------------------------------------------------------


def chat(watched: Watched) -> None:
    watched.settle(detailed=True, System_prompt=RULES, Most_tokens="120", Seed="11", Temperature="0.7")
    for turn, question in enumerate(QUESTIONS):
        watched.ask(question)
        watched.answered(2 * turn + 1)


def tokens(watched: Watched) -> None:
    watched.page.locator(".message").nth(3).get_by_role("button", name="Tokens", exact=True).click()
    watched.page.locator(".token").nth(8).click()
    watched.page.locator(".alternatives").scroll_into_view_if_needed()


def forks(watched: Watched) -> None:
    watched.page.get_by_role("button", name="3 ways").click()
    watched.page.wait_for_selector(".choices > .facts .bar")


def settings(watched: Watched) -> None:
    watched.page.click("summary:has-text('Settings')")


def cache(watched: Watched) -> None:
    if watched.page.locator(".settings[open]").count():
        settings(watched)
    watched.view("Cache")
    watched.page.locator(".branch").first.focus()
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector(".details")


def requests(watched: Watched) -> None:
    watched.view("Requests")
    watched.page.get_by_role("button", name="10 s").click()
    # Time passes in the picture: let its axis fill.
    watched.page.wait_for_timeout(9000)
    lane = watched.page.locator("button.lane").nth(2)
    if lane.count():
        lane.click()
        watched.page.wait_for_selector(".history")
        watched.page.locator("button.lane").first.scroll_into_view_if_needed()


def model(watched: Watched) -> None:
    watched.view("Model")
    watched.page.wait_for_timeout(9000)


VIEWS = (chat, tokens, forks, settings, cache, requests, model)


def photograph(browser: Any, url: str, out: Path, shape: str, views: list[str]) -> None:
    watched = Watched(browser, url, **SHAPES[shape])
    watched.open()
    for view in VIEWS:
        view(watched)
        if not views or view.__name__ in views:
            path = out / (f"page-{view.__name__}.png" if shape == "light" else f"page-{view.__name__}-{shape}.png")
            watched.page.screenshot(path=path)
            print(f"{path}  {path.stat().st_size / 1024:.0f} KB")
    watched.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--url")
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--views", default="", help="names, separated by commas")
    given = parser.parse_args()
    if lacking := missing():
        sys.exit(f"{', '.join(lacking)} missing; CONTRIBUTING.md says how to install it")
    with server(given.url) as url, Others(url), chromium() as browser:
        for shape in [given.only] if given.only else SHAPES:
            photograph(browser, url, given.out, shape, [view for view in given.views.split(",") if view])


if __name__ == "__main__":
    main()
