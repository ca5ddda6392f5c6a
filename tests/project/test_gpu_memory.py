"""What GPU tests take fits on one GPU for all processes, and none of them can take what is free."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fences import ROOT, project_files
from tests.support.kernels import gpu_memory
from tests.support.kernels.gpu_memory import CONTEXT_BYTES, DEVICE_BYTES, GIB, KERNEL_BYTES, PROCESSES, allocation_of
from tests.support.models import cuda_engines


def test_the_largest_tests_fit_on_one_gpu_side_by_side():
    kernels = [KERNEL_BYTES] * PROCESSES
    taken = [CONTEXT_BYTES + size for size in [*map(allocation_of, cuda_engines.tested_in_full()), *kernels]]
    assert sum(sorted(taken)[-PROCESSES:]) <= DEVICE_BYTES


def test_a_tiny_model_is_loaded_by_several_processes_and_a_published_shape_by_one():
    names = [f"tests/x.py::test_{number}[{group}@gpu]" for group in ("tiny a", "tiny b", "big") for number in range(11)]
    kernels = [f"tests/y.py::test_kernel[{number}]" for number in range(5)]
    sent = work_of([*names, *kernels])
    groups = [sorted({gpu_memory.group_of(name) or "kernel" for name in unit}) for unit in sent]
    assert all(len(found) == 1 for found in groups)
    sizes = sorted((found[0], len(unit)) for found, unit in zip(groups, sent))
    tiny = [("tiny a", 1), ("tiny a", 5), ("tiny a", 5), ("tiny b", 1), ("tiny b", 5), ("tiny b", 5)]
    assert sizes == [("big", 11), *[("kernel", 1)] * 5, *tiny]
    assert sorted(name for unit in sent for name in unit) == sorted([*names, *kernels])


class Process:
    """What xdist's scheduler sees of a test process."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.sent: list[list[int]] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent.append(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


def work_of(collection: list[str]) -> list[list[str]]:
    """Return what the scheduler gives to processes at a time, until all tests have run."""
    processes = [Process(number) for number in range(3)]
    options = SimpleNamespace(loadscopereorder=True, maxfail=0)
    spec = [f"{len(processes)}*popen"]
    config = SimpleNamespace(option=options, getvalue=lambda name: spec, getoption=lambda *_: 0)
    schedule = gpu_memory.scheduler(config, None)
    for process in processes:
        schedule.add_node(process)
        schedule.add_node_collection(process, collection)
    schedule.schedule()
    done = set()
    while running := [(p, n) for p in processes for unit in p.sent for n in unit if n not in done]:
        process, index = running[0]
        schedule.mark_test_complete(process, index)
        done.add(index)
    return [[collection[index] for index in unit] for process in processes for unit in process.sent]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gpu", "gpu and not slow"), ("slow", "slow and not gpu"), ("gpu and slow", "gpu and slow"), ("", ""),
        ("families", "families and not slow and not gpu"), ("kernels", "kernels and not slow and not gpu"),
    ],
)  # fmt: skip
def test_a_mark_alone_leaves_out_the_tests_that_are_slow_or_need_a_gpu_too(given, meant):
    assert gpu_memory.completed(given) == meant


def test_no_step_of_whole_models_is_long_enough_for_flashinfer():
    attention = pytest.importorskip("weft.kernels.cuda.attention")
    assert cuda_engines.LONGEST_WORK < attention.FLASHINFER_WORK


def test_a_test_without_a_size_of_memory_is_refused():
    with pytest.raises(AssertionError, match="must state its memory"):
        cuda_engines.load({}, "bfloat16", "auto")


def calls_without_memory(source: str) -> list[int]:
    """Lines that make an `LLM` whose memory is left to it."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "LLM"]
    return [call.lineno for call in made if not any(is_size(keyword) for keyword in call.keywords)]


def is_size(keyword: ast.keyword) -> bool:
    if keyword.arg is None:
        # Options that were put together before, where `load` has checked them.
        return isinstance(keyword.value, ast.BinOp)
    return keyword.arg == "memory" and getattr(keyword.value, "value", None) != "auto"


def test_every_model_on_a_gpu_is_given_a_size_of_memory():
    files = [
        file
        for file in project_files(".py", under="tests")
        if "mark.gpu" in file.read_text() and file != Path(__file__)
    ]
    assert ROOT / "tests/models/test_cuda_models.py" in files
    found = {
        file.name: calls_without_memory(file.read_text())
        for file in [*files, ROOT / "tests/support/models/cuda_engines.py"]
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert calls_without_memory('LLM("x", device="cuda", memory="auto"); LLM("x")') == [1, 1]


def test_a_process_holds_one_model_at_a_time():
    closed = []
    one, other = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("one", "other"))
    try:
        assert cuda_engines.held("one", lambda: one) is one
        assert cuda_engines.held("one", lambda: other) is one
        cuda_engines.release(keep="one")
        assert closed == []
        assert cuda_engines.held("other", lambda: other) is other
        assert closed == ["one"]
    finally:
        cuda_engines.release()
    assert closed == ["one", "other"]


HOLDS_AN_OBJECT = """
import weakref
class Held:
    pass
refs = []
def test_that_fails():
    held = Held()
    refs.append(weakref.ref(held))
    assert held is None
def test_after_it():
    __import__("gc").collect()
    assert refs[0]() is None
"""


@pytest.mark.thorough
def test_a_failed_test_refers_to_nothing_when_the_next_one_begins(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_x.py").write_text(HOLDS_AN_OBJECT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "test_x.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in found.stdout, found.stdout + found.stderr


def test_the_last_exception_holds_no_memory():
    class Tensor:
        pass

    tensor = Tensor()
    tensor.module = tensor
    kept = weakref.ref(tensor)
    sys.last_value = tensor
    del tensor
    cuda_engines.release(keep="one")
    assert kept() is None


@pytest.mark.parametrize(
    ("group", "allocation"),
    [(None, 8 * GIB), ("tiny lfm2 float32", 2 * GIB), ("lfm2-1.2b", allocation_of("lfm2-1.2b"))],
)
def test_a_test_cannot_allocate_more_than_its_share(group, allocation, monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    [parameter] = cuda_engines.for_each(["x"], group or "{}")
    gpu_memory.claim(SimpleNamespace(nodeid=f"tests/test_x.py::test_y[{'1-2' if group is None else parameter.id}]"))
    assert limits == [pytest.approx(allocation / (100 * GIB))]
    assert allocation < 20 * GIB
