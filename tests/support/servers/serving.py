"""A server as users start it: `weft serve` in a process of its own, found by the address that it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import tiny_model

SMALL = [*tiny_model.ARGUMENTS, "--port", "0", "--memory", "64MiB", "--threads", "1", "--max-length", "4096"]
# Far more than anything takes.
SECONDS = 300
ADDRESS = re.compile(r"https?://\S+|unix:\S+")


@dataclass
class Served:
    process: subprocess.Popen[str]
    lines: list[str]  # those that it prints at the start; the last one is its address
    errors: Path
    environment: dict[str, str]

    @property
    def url(self) -> str:
        assert self.lines, self.errors.read_text()
        assert ADDRESS.fullmatch(self.lines[-1]), f"{self.lines!r}\n{self.errors.read_text()}"
        return self.lines[-1]

    @property
    def curl(self) -> str:
        """The request that it logs at the level debug."""
        return self.wait_for("try: curl ").partition("weft: try: ")[2].splitlines()[0]

    @property
    def children(self) -> list[int]:
        """Process ids of its engine. Text workers are not among them."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(number) for number in listed.split() if "engine_process" in command_of(number)]

    def call(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> tuple[int, Any]:
        """Status and decoded answer."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                text = answer.read()
                status = answer.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def wait_for(self, words: str) -> str:
        return wait_for_log(self.process, self.errors, words)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)


def first_lines(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines of a server up to its address; fewer if it ends before."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if ADDRESS.fullmatch(lines[-1]):
            break
    return lines


def wait_for_log(process: subprocess.Popen[str], log: Path, words: str) -> str:
    """Return the log of a process as soon as it holds these words; fail at once where the process ends without them."""
    deadline = time.monotonic() + SECONDS
    while True:
        # In this order: what a process logs last, it logs before it ends.
        ended, text = process.poll(), log.read_text()
        if words in text:
            return text
        assert ended is None, f"the process ended with {ended} before it logged {words!r}:\n{text}"
        assert time.monotonic() < deadline, f"the process did not log {words!r} in {SECONDS} s:\n{text}"
        time.sleep(0.001)


def with_descriptors(count: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one that may open only this many files."""
    return ["sh", "-c", f'ulimit -n {count}; exec "$@"', "sh", *command]


def command_of(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


@contextmanager
def serving(
    *arguments: str, options: Sequence[str] = SMALL, descriptors: int | None = None, **environment: str
) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w") as errors:
        known = {name: value for name, value in os.environ.items() if name != "WEFT_API_KEY"} | environment
        command = [sys.executable, "-m", "weft", "serve", *options, *arguments]
        process = subprocess.Popen(
            command if descriptors is None else with_descriptors(descriptors, command),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=known,
        )
        try:
            assert process.stdout is not None
            yield Served(process, first_lines(process), Path(errors.name), known)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(SECONDS)
            assert process.stdout is not None
            process.stdout.close()
