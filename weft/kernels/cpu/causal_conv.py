"""Causal depthwise convolution over time, in extend form.

A row reads the width - 1 inputs before it from its tail or from the checkpoint before its cell; they are zeros
before position 0. Sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.indices import Convolution
from weft.kernels.cpu.linear import linear
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ConvolutionWeights
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

# Tokens per block, so that its inputs and sums stay in a core's cache from tap to tap.
BLOCK = 64


def causal_conv(
    x: Float[Tensor, "tokens channels"], weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    """Convolve each row with its earlier inputs; store the inputs that later rows need."""
    chosen = indices(batch).convolution
    assert chosen is not None
    assert weights.taps.shape[1] == chosen.width
    taps, bias, activation = weights.taps.t().float(), weights.bias, weights.activation
    if chosen.lone is not None and chosen.all_tail and not chosen.captures:
        return decode_one(x, taps, bias, activation, chosen, view)
    history = read_history(chosen, view)
    if chosen.single:
        y = weighted_sums(torch.cat((history, x.unsqueeze(1)), 1), taps)
        y = finish(y.squeeze(1), bias, activation).to(x.dtype)
    else:
        y = extend(x, taps, bias, activation, history, chosen)
    if chosen.captures:
        capture_windows(x, history, chosen, view)
    keep(x, chosen, view)
    return y


def short_conv(
    x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    before, after, value = linear(x, projection).chunk(3, dim=-1)
    return after * causal_conv(before * value, weights, batch, view)


def decode_one(
    x: Float[Tensor, "1 channels"],
    taps: Float[Tensor, "width channels"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    indices: Convolution,
    view: RecurrentView,
) -> Float[Tensor, "1 channels"]:
    """Compute a row of one token whose history is all in its tail: nothing has to be gathered."""
    assert indices.lone is not None
    number, place = indices.lone
    tail = view.tail["conv"][number]
    y = (tail.index_select(0, indices.tail_ring[0]) * taps[:-1]).sum(0, keepdim=True).addcmul_(x, taps[-1])
    tail[place] = x[0]
    return finish(y, bias, activation).to(x.dtype)


def read_history(indices: Convolution, view: RecurrentView) -> Float[Tensor, "rows back channels"]:
    """Return the width - 1 inputs before each row. Unused memory may hold NaN, so select, never multiply by zero."""
    tail = view.tail["conv"][indices.tail, indices.tail_ring]
    if indices.all_tail:
        return tail
    assert indices.from_tail is not None
    history = torch.where(indices.from_tail.unsqueeze(-1), tail, 0.0)
    if indices.any_state:
        state = view.state["conv"][indices.read_slot, indices.state_index]
        assert indices.from_state is not None
        history = torch.where(indices.from_state.unsqueeze(-1), state, history)
    return history


def weighted_sums(
    line: Float[Tensor, "rows line channels"], taps: Float[Tensor, "width channels"]
) -> Float[Tensor, "rows n channels"]:
    """Return the weighted float32 sum of every window of `width` neighbours along a line."""
    count = line.shape[1] - len(taps) + 1
    if len(line) == count == 1:
        return (line * taps).sum(1, keepdim=True)
    line = line.float()
    y = line[:, :count] * taps[0]
    for tap, weights in enumerate(taps[1:], 1):
        y.addcmul_(line[:, tap : tap + count], weights)
    return y


def finish(
    y: Float[Tensor, "n channels"], bias: Float[Tensor, " channels"] | None, activation: bool
) -> Float[Tensor, "n channels"]:
    if bias is not None:
        y = y.add_(bias)
    return F.silu(y, inplace=True) if activation else y


def extend(
    x: Float[Tensor, "tokens channels"],
    taps: Float[Tensor, "width channels"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    history: Float[Tensor, "rows back channels"],
    indices: Convolution,
) -> Float[Tensor, "tokens channels"]:
    """Compute rows of several tokens: the whole pack as one line, then the rows' heads again with their history."""
    back = indices.width - 1
    y = torch.empty_like(x)
    if indices.body is not None:
        for low in range(*indices.body, BLOCK):
            high = min(low + BLOCK, indices.body[1])
            y[low:high] = finish(weighted_sums(x[None, low - back : high], taps)[0], bias, activation)
    line = torch.cat((history, x[indices.first_token]), 1)
    heads = finish(weighted_sums(line, taps).flatten(0, 1), bias, activation)
    y[indices.real_token] = heads[indices.real].to(y.dtype)
    return y


def keep(x: Float[Tensor, "tokens channels"], indices: Convolution, view: RecurrentView) -> None:
    """Store the last inputs of each row in its tail."""
    tail = view.tail["conv"]
    if indices.lone is not None:
        tail[indices.lone] = x[0]
    else:
        tail[indices.keep_tail, indices.keep_ring] = x if indices.single else x[indices.keep_token]


def capture_windows(
    x: Float[Tensor, "tokens channels"],
    history: Float[Tensor, "rows back channels"],
    indices: Convolution,
    view: RecurrentView,
) -> None:
    """Write the inputs before each captured position into its slot."""
    earlier = history.flatten(0, 1)[indices.capture_history]
    assert indices.capture_is_new is not None
    window = torch.where(indices.capture_is_new.unsqueeze(-1), x[indices.capture_token], earlier)
    view.state["conv"][indices.capture_slot] = window
