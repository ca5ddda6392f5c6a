"""Listens to `/debug/events` of a server, in a thread, and keeps what arrives."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from tests.support.servers.held_steps import SECONDS, wait_until


class Watcher:
    """`batches` are the messages so far, as text and as values. The stream is open once `opened` returns."""

    def __init__(self, url: str, key: str | None = None, query: str = "") -> None:
        self.texts: list[str] = []
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._connection = HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
        self._query = query
        self.status: int | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with suppress(OSError, HTTPException, ValueError):
            self._connection.request("GET", f"/debug/events{self._query}", headers=self._headers)
            self._socket = self._connection.sock
            answer = self._connection.getresponse()
            self.status = answer.status
            while line := answer.readline().decode().rstrip("\n"):
                self._take(line, answer)

    def _take(self, line: str, answer: HTTPResponse) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.texts.append(line[6:])
        # Each message ends with an empty line.
        answer.readline()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self.opening > 0 or self.status not in (None, 200))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._connection.close()

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in list(self.texts)]

    @property
    def opening(self) -> int:
        return sum("opening" in batch for batch in self.batches)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch["events"]]

    def of(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind of one request."""
        return [each for each in self.events if each["id"] == name and each["event"] == kind]

    def wait_for(self, condition: Callable[[Watcher], bool]) -> None:
        wait_until(lambda: condition(self))

    def ended(self, name: str) -> dict[str, Any]:
        """Return the end of a request, once it was reported."""
        self.wait_for(lambda each: bool(each.of(name, "ends")))
        return self.of(name, "ends")[0]


@contextmanager
def watching(url: str, key: str | None = None, query: str = "") -> Iterator[Watcher]:
    watcher = Watcher(url, key, query)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.close()
