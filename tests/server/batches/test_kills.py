"""A server that is killed at any write leaves nothing behind for the next one, which finishes its batches."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.backends import in_loop
from tests.support.servers.batches import Client, batching, jsonl, line
from weft.server.batches.store import Shelf
from weft.server.settings import Limits, ServerSettings

SETTINGS = ServerSettings(limits=Limits(batches=2))
LINES = 3
# The thread that looks does not hear itself.
READER = "reader"
# Files of a folder by name, in their order.
Contents = tuple[tuple[str, bytes], ...]
EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.rmdir")


class States:
    """Contents of a folder, as a kill would leave them before each of a process's operations on files."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[Contents, None] = {}
        self._folder = folder
        self._watching = False
        # Of one thread at a time: others stop at their next operation.
        self._reading = threading.Lock()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        ours = self._watching and event in EVENTS and str(arguments[0]).startswith(str(self._folder))
        if ours and READER not in threading.current_thread().name:
            with self._reading:
                self.keep()

    def keep(self) -> None:
        """Keep what is there now; and the same with the last line of a file half written."""
        with ThreadPoolExecutor(1, READER) as reader:
            contents = reader.submit(self._settled).result()
        self.found[contents] = None
        facts = dict(contents)
        for name, data in contents:
            # Answers are written while a batch is in progress, and not later.
            answers = name.endswith(".journal") and b'"in_progress"' in facts[name.replace(".journal", ".json")]
            if name.endswith(".new") or answers:
                cut = {**facts, name: half_written(data)}
                self.found[tuple(cut.items())] = None

    def _settled(self) -> Contents:
        """Return the contents when another thread's last operation is over."""
        contents = self._contents()
        while (again := self._contents()) != contents:
            contents = again
        return contents

    def _contents(self) -> Contents:
        found = []
        for path in sorted(self._folder.glob("*/*")):
            with suppress(FileNotFoundError):
                found.append((str(path.relative_to(self._folder)), path.read_bytes()))
        return tuple(found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False


def half_written(data: bytes) -> bytes:
    """Return a file without half of its last line."""
    last = data.splitlines()[-1] if data else b""
    return data[: len(data) - 1 - len(last) // 2] if last else data


async def live(folder: Path) -> None:
    """Do all that writes: files, batches that end, fail and are cancelled, more than are kept, and deletions."""
    async with batching(folder, SETTINGS) as app:
        client = Client(app)
        for _ in range(3):
            done = await client.ended((await client.batch([line(f"c{n}", (n + 20,)) for n in range(LINES)]))["id"])
        failing = await client.batch([line("bad", ("x",)), line("good", (20,))])
        await client.ended(failing["id"])
        await client.ask("DELETE", f"/v1/files/{done['output_file_id']}")
        cancelled = await client.batch([line(f"c{n}", (n + 20,)) for n in range(LINES)])
        await client.ask("POST", f"/v1/batches/{cancelled['id']}/cancel")
        await client.ended(cancelled["id"])
        await client.ended((await client.batch([{"no": "batch"}]))["id"])


async def check_next_server(folder: Path) -> None:
    """Start a server in a folder: it finishes all batches, and every file of the folder is one that it knows."""
    async with batching(folder, SETTINGS) as app:
        client = Client(app)
        batches = (await client.ask("GET", "/v1/batches"))["data"]
        for each in batches:
            done = await client.ended(each["id"])
            counts = done["request_counts"]
            if done["status"] == "completed":
                assert counts["completed"] + counts["failed"] == counts["total"]
            names = {kind: done[f"{kind}_file_id"] for kind in ("output", "error")}
            known = {file["id"] for file in (await client.ask("GET", "/v1/files"))["data"]}
            for kind, name in names.items():
                if name in known:
                    lines = [one["custom_id"] for one in await client.output(name)]
                    assert len(lines) == len(set(lines)) == counts["completed" if kind == "output" else "failed"]
        files = (await client.ask("GET", "/v1/files"))["data"]
    expected = {f"{each['id']}.{kind}" for each in files for kind in ("json", "data")}
    expected |= {f"{each['id']}.json" for each in batches}
    assert {path.name for path in folder.glob("*/*")} == expected
    for each in files:
        assert next(folder.glob(f"*/{each['id']}.data")).stat().st_size == each["bytes"]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Contents]:
    """What kills may leave."""
    folder = tmp_path_factory.mktemp("folder")
    states = States(folder)
    with states.watched():
        in_loop(live)(folder)
    assert len(states.found) > 50
    return list(states.found)


@in_loop
async def start_after_each(states: list[Contents], place: Path) -> None:
    for number, contents in enumerate(states):
        folder = place / str(number)
        for name, data in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        await check_next_server(folder)


def test_what_a_kill_at_any_write_leaves_is_finished_or_removed_by_the_next_server(states, tmp_path):
    start_after_each(states, tmp_path)


@pytest.mark.parametrize("forgotten", ["new", "data", "journal"])
def test_a_planted_sweep_that_forgets_a_kind_of_file_is_caught(states, tmp_path, monkeypatch, forgotten):
    sweep = Shelf.sweep

    def forgets(self: Shelf) -> None:
        spared = {path: path.read_bytes() for path in self.folder.glob(f"*.{forgotten}")}
        sweep(self)
        for path, content in spared.items():
            path.write_bytes(content)

    monkeypatch.setattr(Shelf, "sweep", forgets)
    with pytest.raises(AssertionError):
        start_after_each(states, tmp_path)


def test_a_sweep_removes_nothing_that_is_not_its_own(tmp_path):
    shelf = Shelf(tmp_path, Limits())
    names = ["notes.txt", "file-1.data", "batch_x.journal", f"file-{'0' * 24}.data.bak"]
    for name in names:
        (tmp_path / name).write_text("mine")
    kept = f"file-{'1' * 24}"
    (tmp_path / f"{kept}.json").write_text(json.dumps({}))
    (tmp_path / f"{kept}.data").write_bytes(jsonl([]))
    (tmp_path / f"file-{'2' * 24}.data").write_text("left")
    shelf.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {*names, f"{kept}.json", f"{kept}.data"}
