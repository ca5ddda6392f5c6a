"""A real browser for tests of the page: Debian's Chromium, driven by Playwright, and axe, which finds faults of access.

`python -m tests.support.browser` says whether they are installed, and what is missing.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
MODULES = {"playwright": "playwright", "axe_playwright_python": "axe-playwright-python"}
# Nothing is asked of other hosts, and nothing is left from an earlier run.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing() -> list[str]:
    """Return what the tests need and this machine does not have."""
    packages = [package for module, package in MODULES.items() if find_spec(module) is None]
    return ([] if CHROMIUM else ["Chromium"]) + packages


@contextmanager
def chromium() -> Iterator[Any]:
    """Run Chromium without a window and with an empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def axe_script() -> str:
    """Return axe-core, as its package has it."""
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "axe.min.js").read_text()


class Watched:
    """A page, what its console said, and the origins and paths that it asked."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: set[str] = set()
        self.paths: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._note)
        self.url = url

    def _note(self, request: Any) -> None:
        _, _, host, *path = request.url.split("/", 3)
        self.asked.add(host)
        self.paths.append("/" + "".join(path))

    def open(self, waits_for: str = ".box textarea") -> None:
        self.page.goto(self.url + "/")
        self.page.wait_for_selector(waits_for)

    # using it ---------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        self.page.fill(".box textarea", text)
        self.page.press(".box textarea", "Enter")

    def answered(self, place: int) -> Any:
        """Wait until the message at this place is complete, and return it."""
        self.page.wait_for_selector(f".message >> nth={place} >> .facts .bar")
        return self.page.locator(".message").nth(place)

    def settle(self, detailed: bool = False, **settings: str) -> None:
        self.page.click("summary:has-text('Settings')")
        for label, value in settings.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(value)
        if detailed:
            self.page.check(".settings input[type=checkbox]")
        self.page.click("summary:has-text('Settings')")

    def view(self, name: str) -> None:
        self.page.click(f"nav >> text={name}")

    def close(self) -> None:
        """Check what must hold whatever was done: no error was logged, and no other host was asked."""
        self.context.close()
        assert self.said == []
        assert self.asked == {self.url.split("/")[2]}


if __name__ == "__main__":
    if lacking := missing():
        print(
            f"the page is not tested in a browser: {', '.join(lacking)} missing; CONTRIBUTING.md says how to install it"
        )
        sys.exit(1)
