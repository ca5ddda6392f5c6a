"""Kernels that are compiled before their first launch are those that are launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.support.fences import ROOT

pytest.importorskip("triton")

from tests.support.kernels.cuda_attention import LAYER
from tests.support.kernels.operations import CPU
from tests.support.models.cuda_engines import for_each, load_tiny, release
from tests.support.models.engines import model_of
from tests.support.servers.held_steps import SECONDS
from weft.kernels.cuda.attention import flashinfer
from weft.memory.spec import MemorySpec
from weft.runner.cuda import compiling
from weft.start import loading

Start = dict[str, dict[str, int]]


def starts(*names: str) -> dict[str, Start]:
    """Return what the parts of each start compiled and launched, in processes where Triton compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.kernels.compiled_start", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Start] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def of_a_kernel() -> dict[str, Start]:
    return starts("one kernel", "two threads", "broken kernel")


@pytest.mark.kernels
def test_a_kernel_that_was_compiled_ahead_is_launched_without_compiling(of_a_kernel):
    found = of_a_kernel["one kernel"]
    assert found["ahead"] == {"compiled": 2, "read": 0, "launched": 0}
    assert found["launched"] == {"compiled": 0, "read": 0, "launched": 6}
    assert found["another"] == {"compiled": 1, "read": 0, "launched": 1}


@pytest.mark.kernels
def test_launches_of_other_threads_are_not_collected(of_a_kernel):
    assert of_a_kernel["two threads"] == {"meanwhile": {"launched": 1}, "after": {"launched": 1}}


@pytest.mark.kernels
def test_a_kernel_that_does_not_compile_fails_where_it_is_launched(of_a_kernel):
    found = of_a_kernel["broken kernel"]
    assert found == {"ahead": {"compiled": 0, "read": 0, "launched": 0}, "failed": {"CompilationError": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5 head"])
def test_no_step_of_a_start_compiles_what_was_not_compiled_ahead(family):
    found = starts(family)[family]
    assert found["ahead"]["compiled"] > 20
    assert found["ahead"]["launched"] == 0
    for part in ("trials", "recorded", "served"):
        assert (found[part]["compiled"], found[part]["read"]) == (0, 0), part
        assert found[part]["launched"] > 50, part


@pytest.mark.gpu
@pytest.mark.parametrize("name", for_each(["lfm2"], "tiny {} bfloat16"))
def test_on_a_gpu_a_start_compiles_nothing_after_the_kernels_that_it_compiled_ahead(name, monkeypatch):
    from triton import knobs

    measured, late = [], []
    measure_memory = loading.measure_memory

    def measure(*arguments):
        # The first step that launches: from here on every kernel is there.
        measured.append(True)
        return measure_memory(*arguments)

    def listen(*, src, cache_hit, **details):
        if measured:
            late.append((src.name, cache_hit))

    monkeypatch.setattr(loading, "measure_memory", measure)
    monkeypatch.setattr(loading, "compile_once", compiling.compile_kernels)
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    release()
    with load_tiny(name, "bfloat16", is_compiled_ahead=True):
        assert measured
        assert late == []


def test_a_second_start_does_not_search_for_kernels_and_another_model_does(tmp_path, monkeypatch):
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(compiling, "device_name", lambda kind: "a GPU")
    monkeypatch.setattr(compiling, "compile_kernels", lambda model, *rest: compiled.append(model))
    models = [model_of(family) for family in ("llama", "qwen3")]
    for _ in range(2):
        for model in models:
            compiling.compile_once(model, MemorySpec(model.memories(CPU)), CPU, 64, 8)
    assert compiled == models
    [first, _] = models
    compiling.compile_once(first, MemorySpec(first.memories(CPU)), CPU, 128, 8)
    assert compiled == [*models, first], "longer steps may launch other kernels"


# FlashInfer -----------------------------------------------------------------------------------------------------------


class Module:
    """FlashInfer's description of a module: a compiler that ends when the test says so."""

    def __init__(self, is_compiled: bool = False, error: Exception | None = None) -> None:
        self.is_compiled, self.error = is_compiled, error
        self.may_end, self.built = threading.Event(), 0

    def build(self, verbose: bool) -> None:
        assert self.may_end.wait(SECONDS)
        self.built += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def library(monkeypatch):
    """Return a function that makes a module FlashInfer's only one; shapes that were tried are recorded."""
    tried: list[object] = []
    for name in ("modules", "planners", "builds"):
        monkeypatch.setattr(flashinfer, name, {})
    monkeypatch.setattr(flashinfer, "trial_error", lambda shape, backend, device: tried.append(shape))
    monkeypatch.setattr(flashinfer, "new_planner", lambda *arguments: object())

    def install(module: Module) -> list[object]:
        monkeypatch.setattr(flashinfer, "module_of", lambda shape, backend: module)
        return tried

    return install


def test_a_start_does_not_wait_for_flashinfer_and_prompts_use_it_once_it_is_compiled(library):
    module, here = Module(), torch.device("cpu")
    tried = library(module)
    for _ in range(2):
        flashinfer.warm([LAYER], "fa3", here)
        assert not flashinfer.is_warm(LAYER, here)
    module.may_end.set()
    flashinfer.finish_compiling()
    # Loaded by the thread that asks, not by the one that compiled.
    assert tried == []
    assert flashinfer.is_warm(LAYER, here)
    assert flashinfer.is_warm(LAYER, here)
    assert (tried, module.built) == ([LAYER], 1)


def test_what_flashinfer_has_compiled_before_is_loaded_at_start(library):
    module, here = Module(is_compiled=True), torch.device("cpu")
    tried = library(module)
    flashinfer.warm([LAYER], "fa3", here)
    assert (tried, module.built) == ([LAYER], 0)
    assert flashinfer.is_warm(LAYER, here)


def test_a_module_that_fails_to_compile_in_the_background_is_reported_once_and_never_loaded(library, caplog):
    module, here = Module(error=RuntimeError("nvcc not found\nninja: build stopped")), torch.device("cpu")
    tried = library(module)
    flashinfer.warm([LAYER], "fa3", here)
    module.may_end.set()
    flashinfer.finish_compiling()
    for _ in range(2):
        assert not flashinfer.is_warm(LAYER, here)
        flashinfer.warm([LAYER], "fa3", here)
    assert tried == []
    assert [r.getMessage().rpartition("Reason: ")[2] for r in caplog.records] == ["ninja: build stopped"]


def test_a_server_that_stops_does_not_wait_for_flashinfer(library):
    module, others = Module(), set(threading.enumerate())
    library(module)
    flashinfer.warm([LAYER], "fa3", torch.device("cpu"))
    [thread] = [each for each in threading.enumerate() if each.name == "weft-flashinfer" and each not in others]
    assert thread.daemon
    module.may_end.set()
    thread.join()
