"""`weft serve` with several models and real engines: loads and unloads under requests, failures, and memory."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import SECONDS, Served, serving

MODEL = str(tiny_model.FOLDER)
COMMON = ("--weights", "dummy", "--port", "0", "--memory", "64MiB", "--threads", "1", "--max-length", "4096")
# An engine costs 576 MiB, so one fits at a time.
ONE, TWO = "700MiB", "1300MiB"
COMPLETE = "/v1/completions"


def options(memory: str, **models: str) -> list[str]:
    named = [word for name, place in models.items() for word in ("--model", f"{name}={place}")]
    return [*COMMON, "--models-memory", memory, *named]


def ask(model: str, **more):
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **more}


def states(served: Served) -> dict[str, str]:
    return {each["id"]: each["state"] for each in served.call("/v1/models")[1]["data"]}


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A checkpoint that looks like one until its weights are read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    return str(tmp_path)


@pytest.mark.thorough
def test_a_damaged_model_and_a_crash_while_loading_leave_the_others_alone(damaged):
    with serving(options=options(TWO, a=MODEL, b=MODEL, damaged=f"{damaged},weights=checkpoint")) as served:
        assert [line.split()[0] for line in served.lines] == ["models", "memory", "loading", served.url]
        answer = served.call(COMPLETE, ask("a"))[1]["choices"][0]["text"]
        status, refused = served.call(COMPLETE, ask("damaged"))
        assert (status, refused["error"]["code"]) == (503, "model_not_loaded")
        told = [line for line in served.errors.read_text().splitlines() if "model damaged cannot be loaded" in line]
        assert len(told) == 1
        assert str(damaged) not in str(refused)
        [first] = served.children
        found = []
        asking = threading.Thread(target=lambda: found.append(served.call(COMPLETE, ask("b"))))
        asking.start()
        wait_until(lambda: len(served.children) == 2)
        os.kill(next(each for each in served.children if each != first), signal.SIGKILL)
        asking.join(SECONDS)
        assert found[0][0] == 503
        assert "before the model was loaded" in served.wait_for("model b cannot be loaded")
        assert served.call(COMPLETE, ask("a"))[1]["choices"][0]["text"] == answer
        # A running engine that is killed is loaded again.
        os.kill(first, signal.SIGKILL)
        served.wait_for("the engine of model a has ended")
        wait_until(lambda: served.call(COMPLETE, ask("a"))[0] == 200)
        assert served.stop() == 0
        assert "Traceback" not in served.errors.read_text()


def resident_bytes(number: int) -> int:
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


@pytest.mark.slow
def test_a_thousand_requests_for_two_models_that_take_turns_are_all_answered_in_bounded_memory():
    """The models differ in one option, so each answer shows which of them it came from."""
    with serving(options=options(ONE, a=MODEL, b=f"{MODEL},max-length=2048")) as served:
        counts: Counter[int] = Counter()
        texts: set[str] = set()
        most = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.05):
                most = max(most, len(served.children))

        watcher = threading.Thread(target=watch)
        watcher.start()

        def one(number: int) -> None:
            status, found = served.call(COMPLETE, ask("ab"[number // 200 % 2]))
            counts[status] += 1
            texts.add(found["choices"][0]["text"])
            assert found["model"] == "ab"[number // 200 % 2]

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(1000)))
        done.set()
        watcher.join()
        assert counts == {200: 1000}
        assert len(texts) == 1
        assert most == 1
        served.call("/models/unload", {"model": "a"})
        served.call("/models/unload", {"model": "b"})
        wait_until(lambda: set(states(served).values()) == {"idle"} and not served.children)
        assert resident_bytes(served.process.pid) < 600 << 20


@pytest.mark.slow
def test_the_example_serves_its_models():
    file = str(ROOT / "examples" / "several-models.yaml")
    with serving(options=["--config", file, "--port", "0", "--models-memory", "8GiB"]) as served:
        for name, answers in (("long", "long"), ("gpt-4o-mini", "small")):
            status, found = served.call(COMPLETE, ask(name))
            assert (status, found["model"]) == (200, answers)
        assert states(served) == {"small": "loaded", "long": "loaded"}
