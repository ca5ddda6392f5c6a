"""Decodes with drafts in the exact package: the tokens of a sequence are rows of one token, computed as decodes.

Matmuls and attention compute all of them at once: each has the bits of a row alone, and a step writes all keys and
values before it reads any. A convolution or a recurrence reads what the token before has written, so it takes turns:
first all certain tokens, then all first drafts, and so on, each turn by the kernels of decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.choosing import Table
from weft.kernels.cuda.launch.overlap import in_full
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import ChannelDeltaInputs, ConvolutionWeights, DeltaInputs, SsdInputs
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

BY_ROW = ("token_ids", "positions", "start", "slot", "tail", "closing", "host_start")
# Inputs of recurrences that have a line for each token.
BY_TOKEN = {
    SsdInputs: ("x", "dt", "B", "C", "gate"),
    DeltaInputs: ("q", "k", "v", "step", "strength"),
    ChannelDeltaInputs: ("q", "k", "v", "step", "strength"),
}


def in_turns(batch: Batch, sizes: Sequence[int]) -> Batch:
    """Return a batch of decodes whose rows are those of the first turn, then those of the second, and so on."""
    assert batch.decodes == batch.rows == sum(sizes), "turns are of decodes"
    operations, ends = batch.operations, list(accumulate(sizes))
    turns = [(slice(end - size, end), turn_of(batch, end - size, size)) for end, size in zip(ends, sizes, strict=True)]

    def one_by_one(compute: Callable[[slice, Batch], Tensor]) -> Tensor:
        # A kernel of the next turn must not load tails before this turn has written them.
        with in_full():
            return torch.cat([compute(rows, turn) for rows, turn in turns])

    def causal_conv(x: Tensor, weights: ConvolutionWeights, batch: Batch, view: RecurrentView) -> Tensor:
        return one_by_one(lambda rows, turn: operations.causal_conv(x[rows], weights, turn, view))

    def short_conv(
        x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
    ) -> Tensor:
        found = operations.rows_of(x)
        return one_by_one(lambda rows, turn: operations.short_conv(found[rows], projection, weights, turn, view))

    def ssd(inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Tensor | None = None) -> Tensor:
        found = one_by_one(lambda rows, turn: operations.ssd(part_of(inputs, rows), turn, view))
        return found if out is None else out.copy_(found)

    def gated_delta(inputs: DeltaInputs, batch: Batch, view: RecurrentView) -> Tensor:
        return one_by_one(lambda rows, turn: operations.gated_delta(part_of(inputs, rows), turn, view))

    def channel_delta(inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView) -> Tensor:
        return one_by_one(lambda rows, turn: operations.channel_delta(part_of(inputs, rows), turn, view))

    convolutions = {"causal_conv": causal_conv, "short_conv": short_conv}
    own = {**convolutions, "ssd": ssd, "gated_delta": gated_delta, "channel_delta": channel_delta}
    return replace(batch, operations=cast(Operations, Table({**vars(operations), **own})), derived={})


def turn_of(batch: Batch, first: int, size: int) -> Batch:
    """Return the batch of some rows of one token, for operations that read no pages and rotate nothing."""
    rows = slice(first, first + size)
    changes: dict[str, Any] = {name: getattr(batch, name)[rows] for name in BY_ROW}
    changes |= dict.fromkeys(("tokens", "rows", "decodes"), size)
    changes |= {name: getattr(batch, name)[: size + 1] for name in ("first", "host_first")}
    return replace(batch, **changes, longest=1, rotary=None, full=None, windowed=None, host=None, derived={})


def part_of(inputs: Any, rows: slice) -> Any:
    """Return the inputs of some tokens."""
    names = [name for name in BY_TOKEN[type(inputs)] if getattr(inputs, name) is not None]
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})
