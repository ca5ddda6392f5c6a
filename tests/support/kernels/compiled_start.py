"""A start without a GPU: kernels are compiled for sm_90, and launches end in a counter.

`python -m tests.support.kernels.compiled_start FAMILY...` compiles the kernels of a tiny model ahead, then runs all
steps of a start and some of serving, and prints as JSON how many kernels each part compiled and launched. "one kernel",
"two threads" and "broken kernel" do the same with a kernel in place of a model.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

CAPABILITY = 90
TOKENS, ROWS = 1536, 8
# Lengths of new rows in steps that are not recorded.
SERVED = ([1, 1, 1, 300, 700], [65], [1, 1, 500], [200] * 7, [3, 1000])


class Counts:
    """Kernels that were compiled or read from Triton's cache on disk, and launches."""

    def __init__(self) -> None:
        self.compiled = self.read = self.launched = 0

    def listen(self, *, cache_hit: bool, **details: Any) -> None:
        self.compiled += not cache_hit
        self.read += cache_hit

    def take(self) -> dict[str, int]:
        found = dict(vars(self))
        self.compiled = self.read = self.launched = 0
        return found


def fake_driver(counts: Counts) -> Any:
    """What Triton asks of a GPU's driver, up to the launch."""
    from triton.backends.compiler import GPUTarget

    def launcher(source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            counts.launched += 1

        return launch

    utils = SimpleNamespace(
        load_binary=lambda *details: ("module", "function", 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132},
    )
    return SimpleNamespace(
        get_current_device=lambda: -1,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        launcher_cls=launcher,
        utils=utils,
    )


def prepare() -> Counts:
    from triton import knobs
    from triton.runtime import driver

    from weft.kernels.cuda.launch import gpus

    counts = Counts()
    driver.set_active(fake_driver(counts))
    knobs.compilation.listener = counts.listen
    gpus.INTERPRETED = replace(gpus.INTERPRETED, starts_early=True)
    return counts


def model_start(family: str) -> dict[str, dict[str, int]]:
    from tests.support.models.engines import TINY, dummy_model
    from weft.base.plan import StepDrafts
    from weft.drafting.state_lines import StateLines
    from weft.kernels.choosing import everywhere
    from weft.kernels.cuda.launch.ahead import ZeroedMemory
    from weft.memory.spec import MemorySpec
    from weft.runner.cuda.compiling import compile_kernels, steps_of
    from weft.runner.cuda.gpu_memory import PaddingPass, trial_of
    from weft.runner.cuda.recorded import StepRecording
    from weft.runner.hidden_states import HiddenStates
    from weft.runner.runner import Runner

    counts = prepare()
    operations = everywhere("cuda")
    base, drafter = dummy_model(TINY[family.removesuffix(" head")], torch.bfloat16, operations), family.endswith("head")
    model = dummy_head(base, family, operations) if drafter else base
    spec = MemorySpec(model.memories(operations), draft_room=3)
    compile_kernels(model, spec, operations, TOKENS, ROWS, device="cpu", drafter=drafter)
    found = {"ahead": counts.take()}
    # The launches below compute nothing either.
    with torch.inference_mode(), ZeroedMemory():
        for step in steps_of(model, spec, operations, TOKENS, ROWS, "cpu", drafter):
            step()
        found["trials"] = counts.take()
        computes = PaddingPass(HiddenStates(StateLines(ROWS, TOKENS), model.width, torch.bfloat16)) if drafter else None
        more = {"operations": operations, "computes": computes, "recording": StepRecording(4096)}
        runner = Runner(model, spec, 1 << 22, ROWS, **more)
        for _, step in runner.recorded.steps():
            step()
        found["recorded"] = counts.take()
        for ends in SERVED:
            runner.run(trial_of(ends, runner))
        if not drafter:
            for drafts in (1, 2, 3):
                plan = trial_of([1, 1 + drafts], runner)
                runner.run(replace(plan, drafts=StepDrafts(np.array([0, drafts], np.int32))))
        found["served"] = counts.take()
    return found


def dummy_head(base: Any, family: str, operations: Any) -> Any:
    """The MTP head of a tiny model, with random weights."""
    from tests.support.models.engines import TINY
    from tests.support.models.oracle import config_of
    from weft.models.weights import load_head

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config_of(TINY[family.removesuffix(" head")])))
        return load_head(file, base, torch.bfloat16, "dummy", 0, operations)


def read_board(rows: int) -> None:
    from weft.kernels.cuda.sampling import read_board

    seat = torch.zeros(rows, dtype=torch.int32)
    read_board(torch.zeros(9, dtype=torch.int64), seat, seat, seat)


def kernel_start() -> dict[str, dict[str, int]]:
    from weft.kernels.cuda.launch.ahead import compiling_ahead

    counts = prepare()
    with compiling_ahead():
        for rows in (3, 4, 8, 5):
            read_board(rows)
    found = {"ahead": counts.take()}
    for rows in (3, 4, 8, 5, 7, 4):
        read_board(rows)
    found["launched"] = counts.take()
    read_board(9)
    return found | {"another": counts.take()}


def threads_start() -> dict[str, dict[str, int]]:
    """Launch in one thread while another collects."""
    from weft.kernels.cuda.launch.ahead import compiling_ahead

    counts = prepare()
    read_board(3)
    counts.take()
    with compiling_ahead():
        other = threading.Thread(target=read_board, args=(3,))
        other.start()
        other.join()
        read_board(4)
        found = {"meanwhile": {"launched": counts.launched}}
    counts.take()
    read_board(3)
    return found | {"after": {"launched": counts.launched}}


def broken_start() -> dict[str, dict[str, int]]:
    from weft.kernels.cuda import sampling
    from weft.kernels.cuda.launch.ahead import compiling_ahead

    counts = prepare()
    # A kernel's block must have a power of two elements.
    sampling.power_of_two = lambda least: 3
    with compiling_ahead():
        read_board(3)
    found = {"ahead": counts.take()}
    try:
        read_board(3)
    except Exception as error:
        found["failed"] = {type(error).__name__: 1}
    return found


def start(name: str) -> dict[str, dict[str, int]]:
    """Return what a start compiled and launched. Nothing was compiled before it, neither here nor on disk."""
    special = {"two threads": threads_start, "one kernel": kernel_start, "broken kernel": broken_start}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return special[name]() if name in special else model_start(name)


if __name__ == "__main__":
    # What takes longest to import is imported once. Each start is in a process of its own.
    import_module("weft.kernels.cuda.sampling")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps({name: pool.apply(start, (name,)) for name in sys.argv[1:]}))
