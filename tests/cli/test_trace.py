"""`weft trace`: spans say what events say, whatever happens and wherever watching begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import dropwhile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.support.engine.watched import WatchedEngine, judge
from tests.support.hashed.workloads import random_workload, run_and_check
from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import serving
from weft.cli.main import main
from weft.cli.trace.spans import STEPS, WAITS_FOR, TraceSpans
from weft.engine.tracing.events import Wait
from weft.server.settings import ServerSettings
from weft.server.tracing.hub import as_json

KEYS = ServerSettings(api_keys=("first-key",), admin_key="admin-key")


def lanes_of(spans: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for span in spans:
        if span["ph"] == "X":
            found[span["pid"], span["tid"]].append(span)
    return found


def assert_nested(lane: list[dict[str, Any]]) -> None:
    """TraceSpans of a lane contain each other or do not overlap, as viewers need them."""
    open_ends: list[float] = []
    for span in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
        assert span["dur"] >= 0
        # Microseconds of Unix time are not exact in a float.
        while open_ends and open_ends[-1] <= span["ts"] + 1:
            open_ends.pop()
        end = span["ts"] + span["dur"]
        assert not open_ends or end <= open_ends[-1] + 1
        open_ends.append(end)


@pytest.mark.parametrize("seed", range(30))
def test_spans_are_nested_and_add_up_to_what_the_engine_reports(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(WatchedEngine, "first_step", Random(seed).choice([0, 0, 1, 5, 20]))
    engine = run_and_check(random_workload(seed), WatchedEngine).engine
    assert isinstance(engine, WatchedEngine)
    if engine.steps <= engine.first_step:
        return
    seen, spans = judge(engine), TraceSpans()
    # A client hears of a source from its opening on.
    heard = dropwhile(lambda batch: not batch.opening, engine.batches)
    messages = [json.loads(msgspec.json.encode(as_json(batch, True, 0))) for batch in heard]
    found = [span for message in messages for span in spans.take(message)] + list(spans.close())
    lanes = lanes_of(found)
    for lane in lanes.values():
        assert_nested(lane)
    steps = lanes.pop((1, STEPS), [])
    assert len(steps) == sum(len(message["steps"]) for message in messages) == spans.steps
    of_requests = [span for lane in lanes.values() for span in lane]
    whole = {span["name"]: span["args"] for span in of_requests if "end" in span["args"]}
    assert set(whole) == set(seen)
    for name, request in seen.items():
        if request.end is not None:
            assert (whole[name]["end"], whole[name]["tokens"]) == (request.end.reason, request.end.tokens)
    decoded = sum(span["args"]["tokens"] for span in of_requests if span["name"].endswith(" tokens"))
    before = sum(
        event.get("tokens", 0) for message in messages if message.get("opening") for event in message["events"]
    )
    assert before + decoded == sum(request.tokens for request in seen.values())


def test_every_wait_has_words() -> None:
    assert set(WAITS_FOR) == set(Wait)


def test_what_a_client_lost_and_who_was_forgotten_shows() -> None:
    spans, event = TraceSpans(), {"id": "a", "tenant": "", "at": 5.0}
    first = {"at": 5.0, "events": [{**event, "event": "waits", "for": "turn", "prompt": 3}], "lost": 0}
    list(spans.take({**first, "opening": True}))
    found = list(spans.take({"at": 9.0, "events": [], "lost": 7, "opening": True}))
    assert [(span["name"], span["ph"]) for span in found] == [
        ("waits for its turn", "X"), ("a", "X"), ("7 events were lost", "i"),
    ]  # fmt: skip
    assert found[1]["args"]["end"] == "unknown"
    assert spans.lost == 7


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_server_is_traced_until_it_ends_or_the_command_is_interrupted(tmp_path: Path, by_signal: bool) -> None:
    out = tmp_path / "trace.json"
    with serving(KEYS) as served:
        command = [sys.executable, "-m", "weft", "trace", served.url, "--out", str(out)]
        environment = {**os.environ, "WEFT_API_KEY": "admin-key"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        wait_until(out.exists)
        name = served.complete("word " * 50, max_tokens=20, ignore_eos=True)["id"]
        wait_until(lambda: '"end":"length"' in out.read_text())
        if by_signal:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
    shown, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    lanes = lanes_of(json.loads(out.read_text()))
    [request] = [span for lane in lanes.values() for span in lane if span["name"] == name]
    assert (request["args"]["end"], request["args"]["tokens"]) == ("length", 20)
    assert lanes[1, STEPS]
    assert f"are in {out}" in shown


def test_a_wrong_key_leaves_the_file_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    out.write_text("kept")
    with serving(KEYS) as served:
        assert main(["trace", served.url, "--api-key", "wrong", "--out", str(out)]) == 2
        missing = str(tmp_path / "none" / "trace.json")
        assert main(["trace", served.url, "--api-key", "first-key", "--out", missing]) == 2
    assert out.read_text() == "kept"
    shown = capsys.readouterr().err
    assert "401" in shown
    assert "--out cannot be written" in shown
