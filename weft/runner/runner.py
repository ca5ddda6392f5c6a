"""Executes plans: one packed upload, one forward, sampling on the device, one download. Decides nothing.

Between steps it keeps the store (pages, states, tails) and the token board: the token last sampled for every seat,
where the next step finds it without asking the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.base.plan import Landing, Plan, Scores
from weft.memory.device.store import Store
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.batching import build_step
from weft.runner.choices import Choices, draft_choices
from weft.runner.sampler import sample, score

# Logits of prompt tokens to score are made for so many numbers at a time: 64 MiB.
SCORE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """`Scores`, still on the device."""

    chosen: Tensor  # [n]
    top_token: Tensor  # [n, k]
    top_logprob: Tensor  # [n, k]


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A launched plan: the tensors that `land` brings home."""

    tokens: Tensor  # [sampled rows]
    sampled_scores: DeviceScores | None
    prompt_scores: DeviceScores | None


class Runner:
    """The device of an engine: a model, its memory and its token board."""

    def __init__(
        self,
        model: CausalModel,
        spec: MemorySpec,
        budget_bytes: int,
        seats: int,
        device: torch.device | str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self.device = torch.device(device)
        self.store = Store(spec, budget_bytes, self.device)
        self.board = torch.zeros(seats, dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(threads or available_cores())

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunnerFlight:
        for kind, index in plan.poison:
            self.store.poison(kind, index)
        wishes = draft_choices(plan, self.model.vocab_size)
        batch, choices = build_step(plan, self.spec, self.board, self.device, wishes)
        hidden = self.model(batch, self.store.views)
        prompt_scores = self._score_prompt(hidden, choices, plan.score_top) if len(plan.score_index) else None
        if not len(plan.sampled):
            return RunnerFlight(choices.seat, None, prompt_scores)
        # A step of decodes alone wants the logits of every token: no need to pick.
        last = hidden if len(plan.sampled) == len(plan.tokens) else hidden[choices.index]
        logits = self.model.logits(last).float()
        tokens = sample(logits, choices, self.board)
        self.board[choices.seat] = tokens
        sampled_scores = None if choices.top is None else DeviceScores(*score(logits, tokens, choices.top))
        return RunnerFlight(tokens, sampled_scores, prompt_scores)

    def land(self, flight: RunnerFlight) -> Landing:
        parts = [flight.tokens]
        for scores in (flight.sampled_scores, flight.prompt_scores):
            parts += [] if scores is None else [scores.chosen, scores.top_token, scores.top_logprob]
        arrays = _download(parts)
        tokens = next(arrays)
        sampled, prompt = (
            None if scores is None else Scores(next(arrays), next(arrays), next(arrays))
            for scores in (flight.sampled_scores, flight.prompt_scores)
        )
        return Landing(tokens, sampled, prompt)

    def _score_prompt(self, hidden: Float[Tensor, "tokens hidden"], choices: Choices, top: int) -> DeviceScores:
        step = max(1, SCORE_ELEMENTS // self.model.vocab_size)
        parts = [
            score(self.model.logits(hidden[index]).float(), token, top)
            for index, token in zip(choices.score_index.split(step), choices.score_token.split(step))
        ]
        return DeviceScores(*(torch.cat(pieces) for pieces in zip(*parts)))


def _download(tensors: list[Tensor]) -> Iterator[NDArray[Any]]:
    """The tensors as NumPy arrays of 32 bits, in one copy from the device."""
    narrow = [t if t.is_floating_point() else t.int() for t in tensors]
    if tensors[0].device.type == "cpu":
        yield from (t.numpy() for t in narrow)
        return
    flat = torch.cat([t.contiguous().view(torch.int32).flatten() for t in narrow]).cpu().numpy()
    first = 0
    for tensor in narrow:
        piece = flat[first : first + tensor.numel()].reshape(tensor.shape)
        first += tensor.numel()
        yield piece.view(np.float32) if tensor.is_floating_point() else piece


def available_cores() -> int:
    """The cores that this process may use: its affinity, cut by the container's quota and OMP_NUM_THREADS.

    More threads than cores make every step 10 to 20 times slower.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        cores = min(cores, int(wanted))
    return max(1, min(cores, _quota_cores() or cores))


def _quota_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Whole cores of a control group's quota, if it has one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
