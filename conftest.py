"""What every test process needs before anything imports torch or Triton; what it starts inherits it."""

import gc
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.doctest import DoctestModule
from hypothesis.internal.conjecture import providers

# The same examples in every run, however long they take: a failure is one of the change, not of luck.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")
# Hypothesis also draws constants of the modules that a process has imported so far, which is luck.
providers._get_local_constants = lambda constants=providers._local_constants: constants

# Test processes run side by side: one thread each, or they would fight for the cores and take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU, Triton's kernels are run by its interpreter, on tensors of the CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests start some hundred programs, which read the modules that the first of them has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Comparisons in what tests share are reported as those in tests.
pytest.register_assert_rewrite("tests.support")
collect_ignore_glob = [] if find_spec("triton") else ["weft/kernels/cuda/*", "tests/*cuda*"]
# What a process of a test imports instead of its own start: it takes away compilers and files of Linux.
collect_ignore_glob.append("tests/support/elsewhere/*")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the native kernels once, before the first test and not in each of the processes at the same time."""
    from tests.support.kernels.gpu_memory import completed

    config.option.markexpr = completed(config.option.markexpr)
    if not hasattr(config, "workerinput"):
        from weft.kernels.native import library

        library.available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: let the garbage collector not look for garbage in it, neither now nor in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in docstrings only where a text has some: the search imports and walks whole modules."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule) or b">>> " in file_path.read_bytes()]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests of a model on a GPU to few processes: loading it takes memory, and longer than most of its tests."""
    from tests.support.kernels.gpu_memory import scheduler

    return scheduler(config, log) if config.option.markexpr.startswith("gpu") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that do not run by default, and put the tests of a model on a GPU side by side: a process holds
    one model at a time."""
    from tests.support import cases
    from tests.support.kernels.gpu_memory import group_of

    cases.mark(items)
    first: dict[str, int] = {}
    places = {item: first.setdefault(group_of(item.nodeid) or item.nodeid, n) for n, item in enumerate(items)}
    items.sort(key=places.__getitem__)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test finds does not depend on which tests the same process has run before."""
    if item.get_closest_marker("gpu"):
        from tests.support.kernels import gpu_memory

        gpu_memory.claim(item)
    torch = sys.modules.get("torch")
    if torch is not None:
        # Without a GPU, `torch.manual_seed` would record a stack trace for several kinds of them: half a millisecond.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        from tests.support.kernels import interpreter

        interpreter.speed_up()
