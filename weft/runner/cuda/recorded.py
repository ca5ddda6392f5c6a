"""Decode steps recorded as CUDA graphs, one per number of rows (a *bucket*), and replayed for any plan that fits.

Recording runs the model's own code once; replaying it costs the host a few microseconds whatever the model's depth.
Without a GPU the same steps are run eagerly on the same padded inputs, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from weft.memory.device.store import View
from weft.models.model import CausalModel
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.sampler import likeliest


def buckets(most: int) -> list[int]:
    """Numbers of rows to record: powers of two, then steps that waste little.

    >>> buckets(40), buckets(256)[-4:]
    ([1, 2, 4, 8, 16, 24, 32, 40], [192, 208, 224, 256])
    """
    fixed = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256]
    wider = list(range(320, most + 64, 64))
    return [*(rows for rows in [*fixed, *wider] if rows < most), most]


@dataclass(slots=True)
class Outcome:
    """What a step leaves on the device, at the same place after every replay."""

    logits: Tensor  # [rows, vocab]
    tokens: Tensor  # [rows] the likeliest


class RecordedDecodes:
    def __init__(
        self, model: CausalModel, views: tuple[View, ...], board: Tensor, inputs: DecodeInputs, progress: bool
    ) -> None:
        self.model, self.views, self.board, self.inputs = model, views, board, inputs
        self.sizes = buckets(inputs.rows)
        self._replay: dict[int, tuple[Callable[[], None] | None, Outcome | None]] = {}
        if inputs.device.type == "cuda":
            self._record_all(progress)

    def size_for(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def run(self, size: int) -> Outcome:
        """One step on whatever the inputs hold now."""
        replay, outcome = self._replay.get(size, (None, None))
        if replay is None or outcome is None:
            return self._step(size)
        replay()
        return outcome

    def _step(self, size: int) -> Outcome:
        inputs = self.inputs
        seat = inputs.tensor("seat", size)
        known = inputs.tensor("token", size)
        ids = torch.where(inputs.tensor("from_board", size) != 0, self.board[seat].to(known.dtype), known)
        logits = self.model.logits(self.model(inputs.batch(size, ids), self.views))
        tokens = likeliest(logits)
        self.board[seat] = tokens.to(self.board.dtype)
        return Outcome(logits, tokens.int())

    def _record_all(self, progress: bool) -> None:
        """The largest first: the others then find their memory in what it left."""
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(self._padding_only(), desc="recording decode steps", unit="step", disable=not progress):
            # Kernels are compiled and libraries choose their algorithms here, not while recording.
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outcome = self._step(size)
            self._replay[size] = graph.replay, outcome

    def _padding_only(self) -> Sequence[int]:
        """All sizes, with inputs that name no real row."""
        self.inputs.fill_with_padding()
        return self.sizes[::-1]
