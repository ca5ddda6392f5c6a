"""Causal depthwise convolution over time.

A row reads the width - 1 inputs before it from its tail or from the checkpoint before its cell; they are zeros
before position 0. Sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.plain.linear import linear
from weft.kernels.plain.rows import Row, rows_of_step
from weft.kernels.recurrent import ConvolutionWeights
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight


def causal_conv(
    x: Float[Tensor, "tokens channels"], weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    y = torch.empty_like(x)
    taps, tail = weights.taps.t().float(), view.tail["conv"]
    back = len(taps) - 1
    for row in rows_of_step(batch):
        # Inputs from position start - back.
        line = torch.stack([*earlier_inputs(row, back, view), *x[row.tokens]])
        for position in range(row.start, row.end):
            window = line[position - row.start :][: back + 1]
            total = (window.float() * taps).sum(0)
            total = total if weights.bias is None else total + weights.bias
            y[row.packed(position)] = F.silu(total) if weights.activation else total
            tail[row.tail, position % tail.shape[1]] = x[row.packed(position)]
        for position, slot in row.captures.items():
            view.state["conv"][slot] = line[position - row.start :][:back]
    return y


def earlier_inputs(row: Row, back: int, view: RecurrentView) -> list[Float[Tensor, " channels"]]:
    """Return the `back` inputs before a row."""
    tail, state = view.tail["conv"], view.state["conv"]
    inputs = []
    for position in range(row.start - back, row.start):
        if position >= row.cell_start:
            inputs.append(tail[row.tail, position % tail.shape[1]])
        elif position >= 0:
            inputs.append(state[row.slot, position - row.cell_start + back])
        else:
            inputs.append(torch.zeros_like(tail[0, 0]))
    return inputs


def short_conv(
    x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    before, after, value = linear(x, projection).chunk(3, dim=-1)
    return after * causal_conv(before * value, weights, batch, view)
