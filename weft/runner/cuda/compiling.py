"""Kernels of a model, compiled before its first step: those of all steps that a start runs, and of common requests.

Without this, each kernel is compiled at its first launch, one after another; with it, in parallel. Finding out what a
model launches takes seconds, so a start that has done it leaves a mark beside the compiled kernels, in Triton's cache.
A mark that is out of date costs only time: what is missing is compiled at its first launch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from weft.base.plan import Plan, Sampling
from weft.device.devices import device_name
from weft.kernels.interface import Operations
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel, MatrixLayer
from weft.runner.cuda.gpu_memory import largest_steps, scratch_runner, trial_of
from weft.runner.cuda.recorded import recorded_steps
from weft.runner.runner import Runner

log = logging.getLogger("weft")

# Code that decides which kernels are launched.
SOURCES = ("kernels/cuda", "runner", "models")
# Rows of a turn of exact answers with drafts, by the kernels that they need.
TURNS = (1, 17, 40)
# Log-probabilities that clients ask for.
TOP_LOGPROBS = 5


def compile_once(
    model: CausalModel,
    spec: MemorySpec,
    operations: Operations,
    tokens: int,
    rows: int,
    progress: bool = False,
    drafter: bool = False,
) -> None:
    """Compile the kernels of a model, unless an earlier start on this machine has."""
    mark = mark_of(model, spec, operations, tokens, rows, drafter)
    if mark.exists():
        log.debug("kernels were compiled by an earlier start: %s", mark)
        return
    compile_kernels(model, spec, operations, tokens, rows, progress, "cuda", drafter)
    # The cache may be read-only.
    with suppress(OSError):
        mark.touch()


def mark_of(
    model: CausalModel, spec: MemorySpec, operations: Operations, tokens: int, rows: int, drafter: bool = False
) -> Path:
    """Return the path of the mark of these steps. Its name depends on all that decides what is launched."""
    import triton

    shapes = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_parameters()]
    kind = "exact" if operations.is_exact else "usual"
    versions = [weft.__version__, triton.__version__, torch.__version__, device_name("cuda")]
    digest = hashlib.sha256("\n".join([*versions, repr(spec), f"{tokens} {rows} {kind} {drafter}", *shapes]).encode())
    for folder in SOURCES:
        for source in sorted((Path(weft.__file__).parent / folder).rglob("*.py")):
            digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / f"weft-{digest.hexdigest()[:24]}"


def compile_kernels(
    model: CausalModel,
    spec: MemorySpec,
    operations: Operations,
    tokens: int,
    rows: int,
    progress: bool = False,
    device: torch.device | str = "cuda",
    drafter: bool = False,
) -> None:
    """Compile in parallel what steps of up to `tokens` and `rows` launch. Nothing is computed."""
    # Triton is not installed on machines without a GPU.
    from weft.kernels.cuda.launch.ahead import compiling_ahead
    from weft.kernels.cuda.launch.launching import is_known

    if not is_known():
        return
    with torch.inference_mode(), compiling_ahead(progress):
        for step in steps_of(model, spec, operations, tokens, rows, device, drafter):
            step()


def steps_of(
    model: CausalModel,
    spec: MemorySpec,
    operations: Operations,
    tokens: int,
    rows: int,
    device: torch.device | str,
    drafter: bool = False,
) -> Iterator[Callable[[], object]]:
    """Yield the largest steps, prompts of all choices of kernels, the steps that are recorded, and one of each way to
    sample, on scratch memory.

    A `drafter` samples in one way.
    """
    runner = scratch_runner(model, spec, operations, rows + 1, device, drafter)
    for ends in (*largest_steps(tokens, rows), *expert_steps(model, tokens), *stored_steps(model, tokens)):
        yield lambda ends=ends: runner.run(trial_of(ends, runner))  # type: ignore[misc]
    in_turns = operations.is_exact and spec.draft_room > 0
    room = 0 if in_turns else spec.draft_room
    yield from (step for _, step in recorded_steps(runner.placed, rows, 1, room).steps())
    if drafter:
        return
    if in_turns:
        yield from (partial(forward_in_turns, runner, size) for size in TURNS if size < rows)
    for plan in (*sampled_plans(runner), *drafted_plans(runner)):
        yield lambda plan=plan: runner.run(plan)  # type: ignore[misc]


def expert_steps(model: CausalModel, tokens: int) -> list[list[int]]:
    """Return prompts of up to `tokens` that launch all kernels of a model's experts, which depend on the length."""
    # Triton is not installed on machines without a GPU.
    from weft.kernels.cuda.moe.choices import last_tokens

    layers: list[Any] = [module for module in model.modules() if hasattr(module, "route")]
    mixtures = {(layer.route.options["k"], layer.experts.weights.second.experts) for layer in layers}
    return [[size] for size in sorted({size for each in mixtures for size in last_tokens(*each)}) if size < tokens]


def stored_steps(model: CausalModel, tokens: int) -> list[list[int]]:
    """Return prompts of up to `tokens` that launch all kernels of matrices in formats."""
    # Triton is not installed on machines without a GPU.
    from weft.kernels.cuda.linear.packed import LAST_ROWS

    layers = (module for module in model.modules() if isinstance(module, MatrixLayer))
    if not any(part.dense is None for layer in layers for part in layer.stored_parts()):
        return []
    return [[size] for size in LAST_ROWS if size < tokens]


def forward_in_turns(runner: Runner, size: int) -> object:
    """Verify a draft of one of `size` rows in the form of decodes."""
    from weft.kernels.cuda.exact_turns import in_turns

    return runner.eager.forward(in_turns(runner.eager.batch_of(trial_of([1] * (size + 1), runner)), [size, 1]))


def drafted_plans(runner: Runner) -> Iterator[Plan]:
    """Yield steps with a draft, if there may be any: those that are not recorded verify them with other numbers.

    A short prompt beside it is computed by kernels of its own.
    """
    if runner.spec.draft_room:
        yield trial_of([1, 2], runner, np.array([0, 1], np.int32))
        yield trial_of([1, 2, 12], runner, np.array([0, 1, 0], np.int32))


def sampled_plans(runner: Runner) -> Iterator[Plan]:
    """Yield steps of two rows that draw their tokens: with any, with filters, with log-probabilities."""
    ones = np.ones(2, np.float32)
    drawn = replace(Sampling.greedy(2), temperature=ones, uniform=np.full(2, 0.5, np.float32), all_greedy=False)
    for changes in (
        {},
        {"min_p": ones / 20},
        {"top_k": np.full(2, 40, np.int32), "top_p": 0.9 * ones},
        {"top_p": 0.9 * ones, "top_logprobs": np.full(2, TOP_LOGPROBS, np.int32), "wants_logprobs": True},
    ):
        yield trial_of([1, 1], runner, sampling=replace(drawn, **changes))
