"""GPU memory left for pages and states: measured by running the largest steps."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.base.plan import NO_INTS, Ints, Plan, Sampling, StepDrafts
from weft.drafting.state_lines import StateLines
from weft.kernels.interface import Operations
from weft.memory.spec import ALIGNMENT, MemorySpec
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.runner.cuda.padding import Size, trial
from weft.runner.cuda.recorded import draft_sizes, prompt_sizes
from weft.runner.eager import UsualNumerics
from weft.runner.hidden_states import HiddenStates
from weft.runner.passes import HeadPass, ModelPass
from weft.runner.runner import Runner, model_dtype

# For libraries' workspaces and fragmentation: enough in practice, and small beside a model.
SPARE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes."""

    total: int
    weights: int  # and everything else that was allocated before
    work: int  # of the largest steps, measured
    arena: int  # the rest of the share that Weft may use

    def less(self, more: int) -> GpuMemory:
        """Return the memory if steps need some bytes more."""
        return replace(self, work=self.work + more, arena=max(0, self.arena - more))

    def __str__(self) -> str:
        left, total, weights, work = (f"{n / 2**30:.1f}" for n in (self.arena, self.total, self.weights, self.work))
        return f"{left} GiB: the GPU has {total} GiB; weights and other processes take {weights}, steps {work}"


def measure_memory(
    model: CausalModel, spec: MemorySpec, operations: Operations, tokens: int, rows: int, fraction: float
) -> GpuMemory:
    """Measure the room. A prompt step has `tokens`, a decode step `rows`; `fraction` of the GPU may be used."""
    torch.cuda.synchronize()
    # A runner is a cycle: what an attempt before this one held is garbage, and not free yet.
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = total - free
    work = measure_work(model, spec, operations, tokens, rows)
    torch.cuda.empty_cache()
    return GpuMemory(total, taken, work, max(0, int(total * fraction) - taken - work - SPARE_BYTES))


def measure_work(
    model: CausalModel, spec: MemorySpec, operations: Operations, tokens: int, rows: int, drafter: bool = False
) -> int:
    """Return the bytes that steps need besides weights and store. A `drafter` samples each row once."""
    # Recorded steps keep their working memory, but share it with each other.
    prompt, *recorded = largest_steps(tokens, rows)
    peaks = [_peak(model, spec, operations, ends) for ends in recorded]
    if sizes := draft_sizes(rows, spec.draft_room):
        peaks.append(_peak(model, spec, operations, draft_lengths(sizes[-1]), drafts=not drafter))
    return _peak(model, spec, operations, prompt) + max(peaks)


def largest_steps(tokens: int, rows: int) -> list[list[int]]:
    """Return the rows' lengths in the largest steps: of a prompt, of decodes, and of the largest recorded step."""
    largest = prompt_sizes(rows)[-1]
    return [[tokens], [1] * rows, [1] * largest.decodes + [largest.tokens]]


def draft_lengths(size: Size) -> list[int]:
    """Return the rows' lengths in a step with drafts that fills its size.

    >>> draft_lengths(Size(2, 3, 8))
    [1, 1, 4, 4]
    """
    rows = size.longer - 1
    return [1] * size.decodes + [size.tokens // rows] * rows


@torch.inference_mode()
def _peak(model: CausalModel, spec: MemorySpec, operations: Operations, ends: list[int], drafts: bool = False) -> int:
    """Return the bytes that a step of new rows with these lengths needs besides weights and store.

    `drafts`: all tokens of a row but the first are drafts.
    """
    runner = scratch_runner(model, spec, operations, len(ends), "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run(trial_of(ends, runner, np.array(ends, np.int32) - 1 if drafts else NO_INTS))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def scratch_runner(
    model: CausalModel,
    spec: MemorySpec,
    operations: Operations,
    seats: int,
    device: torch.device | str,
    drafter: bool = False,
) -> Runner:
    """Return a runner whose memory is one unit of each kind, for trials."""
    computes = ModelPass(drafter)
    if isinstance(model, MtpHead):
        computes = PaddingPass(HiddenStates(StateLines(seats, 0), model.width, model_dtype(model), device))
    parts = (model, spec, ALIGNMENT, seats, device)
    return Runner(*parts, operations=operations, computes=computes, numerics=UsualNumerics(scratch_units=1))


class PaddingPass(HeadPass):
    """A head whose rows are all padding."""

    def lines(self, plan: Plan) -> Ints:
        return np.full(len(plan.tokens), self.states.rows.padding, np.int32)


def trial_of(ends: list[int], runner: Runner, drafts: Ints = NO_INTS, sampling: Sampling | None = None) -> Plan:
    """Return a plan of new rows with these lengths, some of whose last tokens are drafts, on scratch memory."""
    start, end = np.zeros(len(ends), np.int32), np.array(ends, np.int32)
    where = (runner.spec, runner.store.scratch)
    return trial(start, end, *where, sampling=sampling, drafts=StepDrafts(drafts))
