"""Causal depthwise convolution over time, in extend form.

A row looks back on the width - 1 inputs before it: in its tail, in the checkpoint before its cell, or zeros before
position 0. Sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch, Convolution
from weft.kernels.linear import for_product, linear
from weft.kernels.native.causal_conv import causal_conv as convolve_natively
from weft.kernels.stream import Normed
from weft.memory.device.store import RecurrentView
from weft.memory.spec import Part, RecurrentMemory

# Tokens at a time, so that a block's inputs and sums stay in a core's cache from tap to tap.
BLOCK = 64


def conv_parts(channels: int, width: int, dtype: str) -> tuple[Part, Part]:
    """What a convolution remembers: in a state the width - 1 inputs before it, in a tail each token's input."""
    return Part("conv", (width - 1, channels), dtype), Part("conv", (channels,), dtype)


def short_conv_memory(channels: int, width: int, dtype: str) -> RecurrentMemory:
    """The memory of a layer that has nothing but a convolution."""
    state, tail = conv_parts(channels, width, dtype)
    return RecurrentMemory((state,), (tail,), width)


def causal_conv(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    batch: Batch,
    view: RecurrentView,
) -> Float[Tensor, "tokens channels"]:
    """Convolve each row with what came before it, then SiLU if `activation`; remember what later rows will need.

    Fastest where `weight` is the transpose of a contiguous [width, channels].
    """
    if batch.lanes is not None:
        if batch.lanes.native:
            return convolve_natively(x, weight, bias, activation, batch, view)
        from weft.kernels.cuda import causal_conv as kernels

        return kernels.causal_conv(x, weight, bias, activation, batch, view)
    indices = batch.convolution
    assert indices is not None
    assert weight.shape[1] == indices.width
    taps = weight.t().float()
    if indices.lone is not None and indices.all_tail and not indices.captures:
        return decode_one(x, taps, bias, activation, indices, view)
    history = read_history(indices, view)
    if indices.single:
        y = weighted_sums(torch.cat((history, x.unsqueeze(1)), 1), taps)
        y = finish(y.squeeze(1), bias, activation).to(x.dtype)
    else:
        y = extend(x, taps, bias, activation, history, indices)
    if indices.captures:
        capture_windows(x, history, indices, view)
    keep(x, indices, view)
    return y


def gated_short_conv(
    projected: Float[Tensor, "tokens projected"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    batch: Batch,
    view: RecurrentView,
) -> Float[Tensor, "tokens channels"]:
    """after * conv(before * value), where the three lie side by side in this order: before, after, value (LFM2)."""
    if batch.lanes is not None and batch.lanes.native:
        return convolve_natively(projected, weight, bias, False, batch, view, gated=True)
    before, after, value = projected.chunk(3, dim=-1)
    if batch.lanes is not None:
        from weft.kernels.cuda import causal_conv as kernels

        return kernels.causal_conv(value, weight, bias, False, batch, view, kernels.Gates(before, after))
    return after * causal_conv(before * value, weight, bias, False, batch, view)


def projected_short_conv(
    x: Normed,
    projection: Float[Tensor, "projected inputs"],
    projection_bias: Float[Tensor, " projected"] | None,
    stored: Float[Tensor, "projected inputs"] | None,
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    batch: Batch,
    view: RecurrentView,
) -> Float[Tensor, "tokens channels"]:
    """`gated_short_conv` of a product (`linear.linear`), which few decodes on a GPU need not wait for."""
    if batch.lanes is not None and not batch.lanes.native:
        from weft.kernels.cuda import short_conv as kernels

        x = for_product(x, projection)
        if kernels.suits(x, projection, batch.lanes):
            return kernels.projected_short_conv(x, projection, projection_bias, weight, bias, batch, view)
    return gated_short_conv(linear(x, projection, projection_bias, stored), weight, bias, batch, view)


def decode_one(
    x: Float[Tensor, "1 channels"],
    taps: Float[Tensor, "width channels"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    indices: Convolution,
    view: RecurrentView,
) -> Float[Tensor, "1 channels"]:
    """A row of one token whose history is all in its tail: nothing has to be brought together."""
    assert indices.lone is not None
    number, place = indices.lone
    tail = view.tail["conv"][number]
    y = (tail.index_select(0, indices.tail_ring[0]) * taps[:-1]).sum(0, keepdim=True).addcmul_(x, taps[-1])
    tail[place] = x[0]
    return finish(y, bias, activation).to(x.dtype)


def read_history(indices: Convolution, view: RecurrentView) -> Float[Tensor, "rows back channels"]:
    """The width - 1 inputs before each row. Unused memory may hold NaN, so nothing is multiplied away."""
    tail = view.tail["conv"][indices.tail, indices.tail_ring]
    if indices.all_tail:
        return tail
    history = torch.where(indices.from_tail.unsqueeze(-1), tail, 0.0)
    if indices.any_state:
        state = view.state["conv"][indices.read_slot, indices.state_index]
        history = torch.where(indices.from_state.unsqueeze(-1), state, history)
    return history


def weighted_sums(
    line: Float[Tensor, "rows line channels"], taps: Float[Tensor, "width channels"]
) -> Float[Tensor, "rows n channels"]:
    """Every window of `width` neighbours along a line, weighted and summed in float32."""
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
    """Rows of several tokens: all as if the pack were one line, then the rows' heads once more with their history."""
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
    """Leave the last inputs of each row in its tail."""
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
    window = torch.where(indices.capture_is_new.unsqueeze(-1), x[indices.capture_token], earlier)
    view.state["conv"][indices.capture_slot] = window
