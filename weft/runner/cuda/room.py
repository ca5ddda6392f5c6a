"""How much memory of a GPU is left for pages and states: found by running the largest steps and looking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.base.plan import Captures, Plan, Sampling
from weft.memory.kinds import unit_bytes
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.cuda.recorded import buckets
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
    work = _peak(model, spec, prompt_plan(tokens, spec)) + _peak(model, spec, decode_plan(buckets(rows)[-1], spec))
    torch.cuda.empty_cache()
    return Room(total, taken, work, max(0, int(total * fraction) - taken - work - SPARE_BYTES))


@torch.inference_mode()
def _peak(model: CausalModel, spec: MemorySpec, plan: Plan) -> int:
    """Bytes that a step needs beside weights and store. All rows share one unit of each kind: results mean nothing."""
    budget = 2 * max(unit_bytes(spec).values()) + 4096
    runner = Runner(model, spec, budget, seats=plan.rows, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run(plan, lanes=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def prompt_plan(tokens: int, spec: MemorySpec) -> Plan:
    return _plan(np.zeros(1, np.int32), np.full(1, tokens, np.int32), spec)


def decode_plan(rows: int, spec: MemorySpec) -> Plan:
    return _plan(np.zeros(rows, np.int32), np.ones(rows, np.int32), spec)


def _plan(start: np.ndarray, end: np.ndarray, spec: MemorySpec) -> Plan:
    rows, none, numbers = len(start), np.zeros(0, np.int32), np.zeros(0, np.float32)
    zeros, ones, tokens = np.zeros(rows, np.int32), np.ones(rows, np.float32), int((end - start).sum())
    table = np.zeros((rows, -(-int(end.max()) // spec.cell)), np.int32)
    sampling = Sampling(
        temperature=0 * ones, top_k=zeros, top_p=ones, min_p=0 * ones, uniform=0 * ones, top_logprobs=zeros,
        repetition_penalty=ones, presence_penalty=0 * ones, frequency_penalty=0 * ones, history_row=none,
        history_token=none, history_generated=none, bias_row=none, bias_token=none, bias_value=numbers,
        all_greedy=True, wants_logprobs=False,
    )  # fmt: skip
    return Plan(
        number=0, seat=zeros, start=start, end=end, tokens=np.zeros(tokens, np.int32), from_board=zeros,
        read_slot=zeros, tail=zeros, page_table=table, window_table=table, window_first=zeros,
        captures=Captures(none, none, none), sampled=np.arange(rows, dtype=np.int32), sampling=sampling,
        score_index=none, score_token=none, score_top=0,
    )  # fmt: skip
