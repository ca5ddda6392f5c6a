"""How much memory of a GPU is left for pages and states: found by running the largest steps and looking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.base.plan import Captures, Ints, Plan, Sampling
from weft.memory.device.store import Store
from weft.memory.kinds import Kind
from weft.memory.spec import ALIGNMENT, MemorySpec
from weft.models.model import CausalModel
from weft.runner.runner import Runner

# For libraries' workspaces and for what fragments: seen to be enough, and little beside a model.
SPARE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one GPU."""

    total: int
    weights: int  # and whatever else was there before us
    work: int  # of the largest steps, measured
    arena: int  # what is left of the share that we may take

    def __str__(self) -> str:
        left, total, weights, work = (f"{n / 2**30:.1f}" for n in (self.arena, self.total, self.weights, self.work))
        return f"{left} GiB: of {total} GiB on the GPU, {weights} are taken by weights and others, {work} by steps"


def find_room(model: CausalModel, spec: MemorySpec, tokens: int, rows: int, fraction: float) -> Room:
    """`tokens` in a step of a long prompt, `rows` that decode at once; `fraction` of the GPU may be used."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = total - free
    # Recorded steps keep the memory of their work for themselves.
    work = _peak(model, spec, [0], [tokens]) + _peak(model, spec, [0] * rows, [1] * rows)
    torch.cuda.empty_cache()
    return Room(total, taken, work, max(0, int(total * fraction) - taken - work - SPARE_BYTES))


@torch.inference_mode()
def _peak(model: CausalModel, spec: MemorySpec, start: list[int], end: list[int]) -> int:
    """Bytes that a step of such rows needs beside weights and store."""
    runner = Runner(model, spec, ALIGNMENT, seats=len(start), device="cuda")
    runner.store = Store(spec, ALIGNMENT, "cuda", scratch=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run(trial(np.array(start, np.int32), np.array(end, np.int32), spec, runner.store.scratch), lanes=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def trial(start: Ints, end: Ints, spec: MemorySpec, scratch: dict[Kind, int]) -> Plan:
    """A plan whose rows share one unit of each kind: as much work as any, and results that mean nothing."""
    rows, none, numbers = len(start), np.zeros(0, np.int32), np.zeros(0, np.float32)
    zeros, ones, tokens = np.zeros(rows, np.int32), np.ones(rows, np.float32), int((end - start).sum())
    cells = -(-int(end.max()) // spec.cell)
    pages, window_pages = (np.full((rows, cells), scratch.get(k, 0), np.int32) for k in (Kind.PAGE, Kind.WINDOW))
    sampling = Sampling(
        temperature=0 * ones, top_k=zeros, top_p=ones, min_p=0 * ones, uniform=0 * ones, top_logprobs=zeros,
        repetition_penalty=ones, presence_penalty=0 * ones, frequency_penalty=0 * ones, history_row=none,
        history_token=none, history_generated=none, bias_row=none, bias_token=none, bias_value=numbers,
        all_greedy=True, wants_logprobs=False,
    )  # fmt: skip
    return Plan(
        number=0, seat=zeros, start=start, end=end, tokens=np.zeros(tokens, np.int32), from_board=zeros,
        read_slot=zeros, tail=zeros + scratch.get(Kind.TAIL, 0), page_table=pages, window_table=window_pages,
        window_first=zeros, captures=Captures(none, none, none), sampled=np.arange(rows, dtype=np.int32),
        sampling=sampling, score_index=none, score_token=none, score_top=0,
    )  # fmt: skip
