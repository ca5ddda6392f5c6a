"""Files and batches: bounded, per key, resumed after a kill, behind interactive traffic. Engines without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.fences import ROOT
from tests.support.servers import asgi
from tests.support.servers.asgi import Exchange, PacedEngine, application
from tests.support.servers.backends import in_loop
from tests.support.servers.batches import Client, batching, form, jsonl, line
from tests.support.servers.fake_engines import answer, fake_info
from tests.support.servers.held_steps import SECONDS, wait_until
from weft.base.errors import OptionError, RequestError
from weft.base.tenants import tenant_digest
from weft.engine.events import Output
from weft.server.access.auth import Keys
from weft.server.access.keys import Key, RateLimits
from weft.server.batches import job
from weft.server.batches.journal import BatchAnswer, BatchError, BatchJournal, read_answers
from weft.server.batches.lines import PRIORITY, InvalidBatch, places_of
from weft.server.batches.room import LineRoom
from weft.server.batches.store import Shelf
from weft.server.batches.upload import read_upload
from weft.server.settings import Limits, ServerSettings

KEYS = ServerSettings(api_keys=("one", "two"), admin_key="root")
LINES = 40


@pytest.fixture
def few_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch have eight lines at work at once."""
    monkeypatch.setattr(asgi, "fake_info", lambda: msgspec.structs.replace(fake_info(), max_sequences=16))


@in_loop
async def test_every_line_is_answered_once_under_its_own_id(tmp_path):
    async with batching(tmp_path) as app:
        client = Client(app)
        made = await client.batch([line(f"line-{n}", (n + 20,)) for n in range(LINES)])
        assert (made["status"], made["request_counts"]["total"]) == ("in_progress", LINES)
        done = await client.ended(made["id"])
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        assert done["usage"]["output_tokens"] == 3 * LINES
        assert "cached_tokens" in done["usage"]["input_tokens_details"]
        output = await client.output(done["output_file_id"])
        assert sorted(each["custom_id"] for each in output) == sorted(f"line-{n}" for n in range(LINES))
        for each in output:
            number = int(each["custom_id"].removeprefix("line-"))
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["token_ids"] == answer([number + 20], 3)
        assert done["error_file_id"] is None


@in_loop
async def test_embeddings_are_lines_too(tmp_path, monkeypatch):
    facts = {"size": 2, "normalises": False}
    monkeypatch.setattr(asgi, "fake_info", lambda: fake_info(vectors=facts))
    async with batching(tmp_path) as app:
        client = Client(app)
        lines = [{**line(str(n)), "url": "/v1/embeddings", "body": {"input": [[7] * n + [n]]}} for n in range(5)]
        done = await client.ended((await client.batch(lines, "/v1/embeddings"))["id"])
        found = {each["custom_id"]: each["response"]["body"] for each in await client.output(done["output_file_id"])}
        assert {name: body["data"][0]["embedding"] for name, body in found.items()} == {
            str(n): [n, n + 1] for n in range(5)
        }
        assert done["usage"]["input_tokens"] == sum(n + 1 for n in range(5))


@in_loop
async def test_lines_that_fail_are_in_a_file_of_their_own(tmp_path):
    async with batching(tmp_path) as app:
        client = Client(app)
        made = await client.batch([line("good"), line("bad", temperature=-1), line("none", ())])
        done = await client.ended(made["id"])
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        errors = {each["custom_id"]: each["response"] for each in await client.output(done["error_file_id"])}
        assert errors["bad"]["status_code"] == 400
        assert errors["bad"]["body"]["error"]["param"] == "temperature"
        assert sorted(errors) == ["bad", "none"]


@in_loop
async def test_a_file_that_is_no_batch_fails_with_its_lines(tmp_path):
    lines = [
        line("a"),
        {**line("b"), "url": "/v1/chat/completions"},
        line("a"),
        line("c", stream=True),
        {"custom_id": "d"},
    ]
    async with batching(tmp_path) as app:
        made = await Client(app).batch(lines)
        assert made["status"] == "failed"
        assert [each["line"] for each in made["errors"]["data"]] == [2, 3, 4, 5]


@in_loop
async def test_keys_see_only_their_own_files_and_batches(tmp_path):
    async with batching(tmp_path, KEYS) as app:
        one, two = Client(app, "one"), Client(app, "two")
        made = await one.batch([line("a")])
        done = await one.ended(made["id"])
        for path in (f"/v1/batches/{made['id']}", f"/v1/files/{done['output_file_id']}/content"):
            assert await one.ask("GET", path)
            await two.ask("GET", path, status=404)
        assert (await two.ask("GET", "/v1/files"))["data"] == []
        assert (await two.ask("GET", "/v1/batches"))["data"] == []
        await two.ask("POST", f"/v1/batches/{made['id']}/cancel", {}, 404)
        await two.ask("DELETE", f"/v1/files/{made['input_file_id']}", status=404)
        await Client(app).ask("GET", "/v1/files", status=401)
        for name in ("..%2f", "file-../../x", "file-" + "0" * 24):
            await one.ask("GET", f"/v1/files/{name}", status=404)


@in_loop
async def test_bounds_hold_for_each_key(tmp_path):
    limits = Limits(batch_files=2, batch_file_bytes=2000, batch_folder_bytes=2500, batch_lines=3)
    async with batching(tmp_path, ServerSettings(limits=limits)) as app:
        client = Client(app)
        await client.upload(b"x" * 3000, 413)
        first = await client.upload(b"x" * 1500)
        await client.upload(b"x" * 1500, 413)
        await client.upload(b"x")
        await client.upload(b"x", 413)
        assert (await client.ask("DELETE", f"/v1/files/{first['id']}"))["deleted"]
        made = await client.batch([line(str(n)) for n in range(4)])
        assert made["status"] == "failed"
        assert "3 lines" in made["errors"]["data"][0]["message"]


@in_loop
async def test_answers_count_against_the_bytes_of_a_key(tmp_path, few_at_work):
    limits = Limits(batch_folder_bytes=16_000)
    async with batching(tmp_path, ServerSettings(limits=limits)) as app:
        client = Client(app)
        made = await client.batch([line(f"line-{n}") for n in range(LINES)])
        done = await client.ended(made["id"])
        assert done["status"] == "failed"
        assert "fill all bytes" in done["errors"]["data"][0]["message"]
        assert 0 < done["request_counts"]["completed"] < LINES
        assert len(await client.output(done["output_file_id"])) == done["request_counts"]["completed"]
        # Where nothing is left, nothing begins. The journal of a batch goes after its end is known.
        async with asyncio.timeout(SECONDS):
            while any(tmp_path.glob("*/*.journal")):
                await asyncio.sleep(0.001)
        await client.upload(b"x" * (16_000 - sum(path.stat().st_size for path in tmp_path.glob("*/*"))))
        again = {"input_file_id": made["input_file_id"], "endpoint": "/v1/completions"}
        refused = await client.ask("POST", "/v1/batches", again, 413)
        assert "all of its 16000 bytes" in refused["error"]["message"]


@in_loop
async def test_a_batch_whose_file_is_gone_fails_and_the_next_one_runs(tmp_path):
    async with batching(tmp_path, run=False) as app:
        engine = Client(app)
        file = await engine.upload(jsonl([line("a")]))
    async with batching(tmp_path) as app:
        client = Client(app)
        for path in tmp_path.glob(f"*/{file['id']}.data"):
            path.unlink()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        made = await client.ask("POST", "/v1/batches", asked)
        assert made["status"] == "failed"
        # So does one that had begun.
        folder = next(tmp_path.glob("*/*.json")).parent
        begun = {**made, "id": "batch_" + "0" * 24, "status": "in_progress", "errors": None}
        (folder / f"{begun['id']}.json").write_text(json.dumps(begun))
        assert (await client.ended((await client.batch([line("b")]))["id"]))["status"] == "completed"
        assert (await client.ended(begun["id"]))["status"] == "failed"


@in_loop
async def test_a_key_at_its_rate_limit_does_not_hold_up_the_batches_of_others(tmp_path, few_at_work):
    slow = Key("slow", rates=RateLimits(tokens_per_minute=10))
    settings = ServerSettings(api_keys=(slow, "two"), admin_key="root")
    async with batching(tmp_path, settings) as app:
        # Each of these waits for a minute: no prompt of this length is ever allowed.
        await Client(app, "slow").batch([line(f"line-{n}", range(20, 60)) for n in range(LINES)])
        other = Client(app, "two")
        made = await other.batch([line("a")])
        assert (await other.ended(made["id"]))["status"] == "completed"


@in_loop
async def test_the_batches_of_a_removed_key_stop(tmp_path, few_at_work):
    engine, keys = PacedEngine(), Keys(KEYS)
    async with batching(tmp_path, KEYS, engine, keys=keys) as app:
        client = Client(app, "one")
        made = await client.batch([line(f"line-{n}") for n in range(LINES)])
        async with asyncio.timeout(SECONDS):
            while not any(path.stat().st_size for path in tmp_path.glob("*/*.journal")):
                engine.allow(1)
                await asyncio.sleep(0.001)
        keys.replace(ServerSettings(api_keys=("two",), admin_key="root"))
        engine.free()
        async with asyncio.timeout(SECONDS):
            while any("_run_all" in str(task.get_coro()) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.001)
        journal = next(tmp_path.glob(f"*/{made['id']}.journal"))
        assert journal.read_bytes().count(b"\n") < LINES
        # It goes on once the key is back, with the next batch at the latest.
        keys.replace(KEYS)
        await client.batch([line("b")])
        assert (await client.ended(made["id"]))["request_counts"]["completed"] == LINES


@in_loop
async def test_a_folder_has_one_server(tmp_path):
    (tmp_path / "lock").touch()
    held = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", held, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OptionError, match="another server"):
            async with batching(tmp_path):
                pass
        other.kill()
    async with batching(tmp_path):
        pass


@in_loop
async def test_a_batch_is_cancelled_with_what_it_has(tmp_path):
    engine = PacedEngine()
    async with batching(tmp_path, engine=engine) as app:
        client = Client(app)
        made = await client.batch([line(str(n), max_tokens=1000) for n in range(8)])
        engine.allow(1)
        assert (await client.ask("POST", f"/v1/batches/{made['id']}/cancel", {}))["status"] == "cancelling"
        engine.free()
        done = await client.ended(made["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("cancelled", 0)
        # The next one runs.
        again = await client.batch([line("x")])
        assert (await client.ended(again["id"]))["status"] == "completed"


@in_loop
async def test_the_usage_of_a_key_counts_each_line(tmp_path):
    keys = Keys(KEYS)
    async with batching(tmp_path, KEYS, keys=keys) as app:
        client = Client(app, "one")
        await client.ended((await client.batch([line(f"line-{n}") for n in range(LINES)]))["id"])
    (usage,) = keys.usage.days.values()
    assert usage["key-1"].generated_tokens == 3 * LINES
    assert usage["key-1"].requests > LINES


@in_loop
async def test_lists_are_paged_and_filtered(tmp_path):
    async with batching(tmp_path) as app:
        client = Client(app)
        names = [(await client.upload(b"x"))["id"] for _ in range(3)]
        first = await client.ask("GET", "/v1/files")
        assert sorted(each["id"] for each in first["data"]) == sorted(names)
        for limit in ("0", "x", "10001", "%C2%B2"):
            exchange = Exchange(app, "/v1/files", query_string=f"limit={limit}".encode())
            assert (await exchange.answer()).status == 400


@in_loop
async def test_without_a_folder_the_routes_say_how_to_get_them():
    async with application() as app:
        found = await Client(app).ask("GET", "/v1/batches", status=404)
        assert "--batch-folder" in found["error"]["message"]


# drops ----------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(folder: Path, pattern: str) -> Iterator[list[Any]]:
    """Keep files open, to see what is written over them before they are removed."""
    with ExitStack() as stack:
        yield [stack.enter_context(path.open("rb")) for path in folder.glob(pattern)]


@in_loop
async def test_a_drop_overwrites_the_files_and_results_of_its_tenant_only(tmp_path):
    async with batching(tmp_path, KEYS) as app:
        one, two, root = Client(app, "one"), Client(app, "two"), Client(app, "root")
        done = await one.ended((await one.batch([line("a")]))["id"])
        other = await two.ended((await two.batch([line("b")]))["id"])
        tenant = tenant_digest(Keys(KEYS).tenants[0].salt).hex()
        with opened(tmp_path, f"{tenant}/*") as files:
            sizes = [len(file.read()) for file in files]
            dropped = await root.ask("DELETE", "/cache", query_string=b"tenant=key-1")
            # The input and the output, and the batch.
            assert dropped["dropped_batch_files"] == 3
            for file, size in zip(files, sizes, strict=True):
                file.seek(0)
                assert file.read() == bytes(size)
        assert (await one.ask("GET", "/v1/files"))["data"] == (await one.ask("GET", "/v1/batches"))["data"] == []
        await one.ask("GET", f"/v1/files/{done['output_file_id']}/content", status=404)
        assert len(await two.output(other["output_file_id"])) == 1
        # A removed key is named by its digest, and all by `all`.
        again = await one.ended((await one.batch([line("c")]))["id"])
        assert again["status"] == "completed"
        dropped = await root.ask("DELETE", "/cache", query_string=f"digest={tenant}".encode())
        assert dropped["dropped_batch_files"] == 3
        assert (await root.ask("DELETE", "/cache", query_string=b"prefix=" + b"00" * 32)).get(
            "dropped_batch_files"
        ) is None
        assert (await root.ask("DELETE", "/cache", query_string=b"all=true"))["dropped_batch_files"] == 3
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@in_loop
async def test_a_drop_cancels_the_batch_that_runs(tmp_path, few_at_work):
    engine = PacedEngine()
    async with batching(tmp_path, KEYS, engine) as app:
        client = Client(app, "one")
        made = await client.batch([line(f"line-{n}", max_tokens=1000) for n in range(LINES)])
        async with asyncio.timeout(SECONDS):
            while not any("_work" in str(task.get_coro()) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.001)
        dropping = asyncio.ensure_future(Client(app, "root").ask("DELETE", "/cache", query_string=b"tenant=key-1"))
        engine.free()
        assert (await dropping)["dropped_batch_files"] == 2
        assert not any("_work" in str(task.get_coro()) for task in asyncio.all_tasks())
        await client.ask("GET", f"/v1/batches/{made['id']}", status=404)
        again = await client.batch([line("x")])
        assert (await client.ended(again["id"]))["status"] == "completed"


@in_loop
async def test_a_drop_waits_for_the_results_that_are_being_written(tmp_path, monkeypatch):
    began, go = threading.Event(), threading.Event()
    original = Shelf.add_output

    def slow(self: Shelf, lines: Any, *more: Any) -> Any:
        began.set()
        assert go.wait(SECONDS)
        return original(self, lines, *more)

    monkeypatch.setattr(Shelf, "add_output", slow)
    async with batching(tmp_path) as app:
        client = Client(app)
        await client.batch([line("a")])
        assert await asyncio.to_thread(began.wait, SECONDS)
        dropping = asyncio.ensure_future(client.ask("DELETE", "/cache", query_string=b"all=true"))
        async with asyncio.timeout(SECONDS):
            while not any(tmp_path.glob("dropped-*/*.journal")):
                await asyncio.sleep(0.001)
        go.set()
        await dropping
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@in_loop
async def test_a_drop_that_could_not_write_is_repeated_by_the_next_one_and_by_a_restart(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    async with batching(tmp_path) as app:
        client = Client(app)
        await client.ended((await client.batch([line("a")]))["id"])
        with monkeypatch.context() as patch:
            patch.setattr("weft.server.batches.store.overwrite", fail)
            found = await client.ask("DELETE", "/cache", status=500, query_string=b"all=true")
            assert (found["erased"], "Input/output error" in found["reason"]) == (False, True)
            assert any(tmp_path.glob("dropped-*"))
        assert (await client.ask("GET", "/v1/files"))["data"] == []
        await client.ask("DELETE", "/cache", query_string=b"all=true")
        assert not any(tmp_path.glob("dropped-*"))
    left = tmp_path / "dropped-0"
    left.mkdir()
    (left / "file-0.data").write_text("secret")
    async with batching(tmp_path):
        assert not left.exists()


# room -----------------------------------------------------------------------------------------------------------------


@in_loop
async def test_batches_leave_room_for_interactive_requests_however_many_answers_a_line_asks_for(tmp_path, few_at_work):
    class Counting(PacedEngine):
        open = most = 0

        def add(self, *args: Any) -> int:
            self.open += 1
            self.most = max(self.most, self.open)
            return super().add(*args)

        def step(self) -> list[Output]:
            found = super().step()
            self.open -= sum(each.finish is not None for each in found)
            return found

    engine, settings = Counting(), ServerSettings(limits=Limits(open_sequences=16))
    engine.free()
    async with batching(tmp_path, settings, engine) as app:
        client = Client(app)
        # Eight sequences for each line: one line at a time.
        lines = [line(f"line-{n}", max_tokens=30) for n in range(6)]
        for each in lines:
            each["body"] |= {"prompt": [[5], [6]], "n": 4}
        too_many = line("too-many")
        too_many["body"] |= {"prompt": [[5], [6], [7]], "n": 4}
        made = await client.batch([too_many, *lines])
        done = await client.ended(made["id"])
        assert done["request_counts"]["completed"] == 6
        assert engine.most == 8
        (refused,) = await client.output(done["error_file_id"])
        assert refused["custom_id"] == "too-many"
        assert "opens 12 sequences at once; a line of a batch may open 8" in str(refused["response"]["body"])


@in_loop
async def test_lines_get_room_in_their_order_also_if_some_are_cancelled():
    room, began = LineRoom(4, 100), []

    async def hold(name: str, sequences: int, end: asyncio.Event) -> None:
        async with room.taken(sequences):
            began.append(name)
            await end.wait()

    ends = {name: asyncio.Event() for name in "abcde"}
    tasks = {}
    for name, sequences in zip("abcde", (3, 9, 1, 2, 4)):
        tasks[name] = asyncio.ensure_future(hold(name, sequences, ends[name]))
        await asyncio.sleep(0)
    assert began == ["a"]
    # The second one wants everything; without it, the third one fits.
    tasks["b"].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert began == ["a", "c"]
    ends["a"].set()
    # It is given its room and cancelled at once.
    await asyncio.sleep(0)
    tasks["d"].cancel()
    ends["c"].set()
    ends["e"].set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert began[-1] == "e"
    async with room.taken(4):
        pass


@in_loop
async def test_lines_are_read_outside_the_event_loop(tmp_path, monkeypatch):
    threads = set()
    original = job.request_at

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(job, "request_at", noted)
    async with batching(tmp_path) as app:
        client = Client(app)
        done = await client.ended((await client.batch([line("a")]))["id"])
        assert done["status"] == "completed"
    assert threads
    assert threading.main_thread() not in threads


# order ----------------------------------------------------------------------------------------------------------------


def test_prompts_that_begin_alike_follow_each_other(tmp_path):
    path = tmp_path / "in.jsonl"
    stems = [[1] * 50, [2] * 50, [3] * 50]
    lines = [line(f"{stem[0]}-{n}", [*stem, n]) for n in range(5) for stem in stems]
    path.write_bytes(jsonl(lines))
    order = [place.custom_id.partition("-")[0] for place in places_of(path, None, Limits())]
    assert order == ["1"] * 5 + ["2"] * 5 + ["3"] * 5
    # The input interleaves them.
    assert [each["custom_id"].partition("-")[0] for each in lines[:3]] == ["1", "2", "3"]


@in_loop
async def test_lines_come_after_all_interactive_requests(tmp_path):
    seen: list[int] = []

    class Noting(PacedEngine):
        def add(self, request: Any, constraint: None = None) -> int:
            seen.append(request.priority)
            return super().add(request, constraint)

    engine = Noting()
    engine.free()
    async with batching(tmp_path, engine=engine) as app:
        client = Client(app)
        done = await client.ended((await client.batch([line("a", priority=-5)]))["id"])
        assert done["status"] == "completed"
        await client.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 1})
    assert seen == [PRIORITY, 0]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"{", b"[1]\n", b'{"custom_id": 5}\n', b"\xff\n", b"[" * 10_000])
def test_hostile_files_are_refused(tmp_path, data):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(InvalidBatch):
        places_of(path, None, Limits())


# forms ----------------------------------------------------------------------------------------------------------------


def test_a_form_is_read():
    body, headers = form(b'{"a": "\r\n--x"}')
    found = read_upload(headers["content-type"], body)
    assert (found.filename, found.purpose, found.data) == ("in.jsonl", "batch", b'{"a": "\r\n--x"}')


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\na\r\n--x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nname="file"\r\n\r\na'),
        ("multipart/form-data; boundary=x", b'--x\r\nname="purpose"\r\n\r\nbatch\r\n--x--'),
        ("multipart/form-data; boundary=x", b'--x\r\nname="file"\r\n\r\na\r\n' * 20 + b"--x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nname="file"' + b"y" * 2000 + b"\r\n\r\na\r\n--x--"),
    ],
)
def test_hostile_forms_are_refused(kind, body):
    with pytest.raises(RequestError):
        read_upload(kind, body)


# restarts -------------------------------------------------------------------------------------------------------------


def test_a_journal_cuts_off_a_line_that_was_not_complete(tmp_path):
    path = tmp_path / "journal"
    journal = BatchJournal(path)
    given = [BatchAnswer(f"r{n}", f"c{n}", None, BatchError(None, "x")) for n in range(3)]
    for each in given:
        journal.append(each)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    BatchJournal(path).close()
    assert [each.custom_id for each in read_answers(path)] == ["c0", "c1"]


@contextmanager
def server(folder: Path, step_seconds: float) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "tests.support.servers.batch_server", str(folder), str(step_seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
                yield process, client
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_killed_server_answers_every_line_exactly_once_after_its_restart(tmp_path):
    count = 150
    data = jsonl([line(f"line-{n}", (n % 200 + 20,), max_tokens=2) for n in range(count)])
    with server(tmp_path, 0.001) as (process, client):
        file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        name = client.post("/v1/batches", json=asked).json()["id"]
        # In the middle: some lines are answered, others are not.
        wait_until(lambda: client.get(f"/v1/batches/{name}").json()["request_counts"]["completed"] > 20)
        process.kill()
        process.wait()
    before = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/*.journal"))
    assert 20 < before < count
    with server(tmp_path, 0.0) as (_, client):
        wait_until(lambda: client.get(f"/v1/batches/{name}").json()["status"] == "completed")
        done = client.get(f"/v1/batches/{name}").json()
        output = client.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = [json.loads(each) for each in output]
    assert sorted(each["custom_id"] for each in found) == sorted(f"line-{n}" for n in range(count))
