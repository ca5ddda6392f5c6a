"""The gated short convolution of few decodes fused with the matmul before it.

A program takes some channels of all rows: it multiplies the weights of their input gates, of their output gates and
of the channels themselves, and convolves the results while they are still in registers. So no kernel waits for a
complete matmul, and beyond reading the weights a decode costs one kernel instead of two. For one row all weights are
loaded at once (`vectors`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.causal_conv.convolution import (
    Gates,
    causal_conv,
    earlier_of,
    load_taps,
    store_window,
    sum_earlier,
)
from weft.kernels.cuda.launch.arguments import STEP, rows_of, window_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear import for_matmul, linear
from weft.kernels.cuda.linear.few import INPUTS, are_few, rows_compiled, summed_products
from weft.kernels.cuda.linear.vectors import LOADS, Vectors, add_products, hold, normed, operands, pieces, tiles
from weft.kernels.cuda.norm import LazyNorm
from weft.kernels.cuda.norm import rows_of as rows_of_norm
from weft.kernels.cuda.recurrent.tails import place_of
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ConvolutionWeights
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = ["causal_conv", "short_conv"]

# Measured on an H200, on whole steps of a model of 2,048 channels. Channels per program: three outputs each, padded to
# four, because sizes are powers of two. Then the number of steps by which weights are prefetched.
CHANNELS = 16
STAGES = 4
# For one row.
CHANNELS_OF_ONE = 2
WARPS = 4


def short_conv(
    x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens channels"]:
    matrix = projection.matrix
    rows = rows_of_norm(x) if matrix is None else for_matmul(x, matrix)
    if matrix is not None and suits(rows, matrix, batch):
        return projected_short_conv(rows, matrix, projection.bias, weights.taps, weights.bias, batch, view)
    before, after, value = linear(rows, projection).chunk(3, dim=-1)
    return causal_conv(value, weights, batch, view, Gates(before, after))


def suits(
    x: Float[Tensor, "rows inputs"] | LazyNorm, projection: Float[Tensor, "projected inputs"], batch: Batch
) -> bool:
    """Return whether `projected_short_conv` supports them: few rows, all of them decodes."""
    return batch.pieces == 0 and are_few(x.x if isinstance(x, LazyNorm) else x, projection)


def projected_short_conv(
    x: Float[Tensor, "rows inputs"] | LazyNorm,
    projection: Float[Tensor, "projected inputs"],
    projection_bias: Float[Tensor, " projected"] | None,
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    batch: Batch,
    view: RecurrentView,
    by_vectors: bool = True,
) -> Float[Tensor, "rows channels"]:
    """Return the convolution. One row is multiplied `by_vectors`, which is faster, or as one of few rows."""
    row, source = operands(x)
    (rows, inputs), (channels, width) = row.shape, weight.shape
    assert rows == batch.decodes
    assert len(projection) == 3 * channels
    assert width - 1 <= batch.cell
    y = torch.empty(rows, channels, dtype=row.dtype, device=row.device)
    alone = rows == 1 and by_vectors
    at_once = channels_of_one(inputs) if alone else CHANNELS
    short_conv_kernel[(-(-channels // at_once),)](
        source,
        named(
            x_stride=row.stride(0), projection=projection, projection_bias=projection_bias, weight=weight,
            weight_channel=weight.stride(0), weight_tap=weight.stride(1), bias=bias, y=y, rows=rows, channels=channels,
            ring=view.tail["conv"].shape[1], cell=batch.cell,
        ),
        window_of(view), rows_of(batch),
        ROWS=1 if alone else rows_compiled(rows), CHANNELS=at_once, SIZE=inputs, WIDTH=width,
        COLUMNS=Vectors(1, WARPS).columns if alone else INPUTS,
        num_warps=WARPS, num_stages=STAGES, **early(row),
    )  # fmt: skip
    return y


def channels_of_one(inputs: int) -> int:
    """Return the number of channels whose weights fit in one program.

    >>> channels_of_one(2048), channels_of_one(4096)
    (2, 1)
    """
    return CHANNELS_OF_ONE if 3 * CHANNELS_OF_ONE * Vectors(1, WARPS).pieces(inputs) <= LOADS else 1


@jit(**STEP)
def short_conv_kernel(
    x, scale, eps, change, factor, stream, norm, x_stride, projection, projection_bias,
    weight, weight_channel, weight_tap, bias, y, rows, channels, ring, cell,
    state, state_stride, tail_conv, tail_conv_stride, row_start, row_first, row_slot, row_tail, row_closing,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y.dtype.element_ty
    first = tl.program_id(0) * CHANNELS
    row = tl.arange(0, ROWS)
    is_row = row < rows
    channel = (first + tl.arange(0, CHANNELS))[:, None]
    is_channel = channel < channels
    real = is_channel & is_row[None, :]
    # Rows, tails, windows and weights are older than the previous kernel.
    at = place_of(row[None, :], row_start, row_first, row_slot, row_tail, row_closing, cell, is_row[None, :])
    earlier = earlier_of(at, state, state_stride, tail_conv, tail_conv_stride, ring)
    offset = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32) if bias is not None else 0.0
    total = sum_earlier(earlier, weight, weight_channel, weight_tap, channel, channels, real, WIDTH)
    taps = load_taps(weight, WIDTH - 1, channel, weight_channel, weight_tap, is_channel)
    if ROWS == 1:
        before, after, value = project_one(
            x, scale, eps, change, factor, stream, norm, projection, projection_bias, first, channels, dtype,
            CHANNELS, SIZE, COLUMNS, EARLY,
        )  # fmt: skip
    else:
        before, after, value = project(
            x, projection, projection_bias, first, channels, row, is_row, x_stride, dtype,
            ROWS, CHANNELS, SIZE, COLUMNS, EARLY,
        )  # fmt: skip
    new = (value.to(tl.float32) * before.to(tl.float32)).to(dtype)
    total += new.to(tl.float32) * taps
    if bias is not None:
        total += offset
    total *= after.to(tl.float32)
    tl.store(y + row[None, :] * channels + channel, total.to(dtype), mask=real)
    closed = state + at.closing * state_stride
    store_window(closed, new, earlier, channel, channels, real & (at.closing >= 0), WIDTH)
    # The ring is no longer than what was read: the new input replaces the oldest.
    tl.debug_barrier()
    tl.store(earlier.tail + (at.start % ring) * channels + channel, new, mask=real)


@triton.jit
def project(
    x, projection, bias, first, channels, row, is_row, x_stride, dtype: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return the channels' input gates, output gates and values, rounded where a separate matmul would be."""
    # A channel's outputs lie beside each other, padded with a fourth.
    number = tl.arange(0, 4 * CHANNELS)
    part = number % 4
    output = first + number // 4
    is_output = (output < channels) & (part < 3)
    output += part * channels
    products = summed_products(
        x, projection, output, is_output, row, is_row, 0, SIZE, SIZE, x_stride,
        ROWS, 4 * CHANNELS, COLUMNS, SIZE % COLUMNS == 0, EARLY,
    )  # fmt: skip
    if bias is not None:
        products += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    parts = tl.permute(tl.reshape(products.to(dtype), (CHANNELS, 4, ROWS)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(parts, (CHANNELS, ROWS, 2, 2)))
    before, value = tl.split(even)
    after, _ = tl.split(odd)
    return before, after, value


@triton.jit
def project_one(
    x, scale, eps, change, factor, stream, norm, projection, bias, first, channels, dtype: tl.constexpr,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return the results of `project` for one row."""
    channel = (first + tl.arange(0, CHANNELS)).to(tl.int64)
    real = channel < channels
    befores = tiles(projection, channel, real, SIZE, COLUMNS)
    afters = tiles(projection, channel + channels, real, SIZE, COLUMNS)
    own = tiles(projection, channel + 2 * channels, real, SIZE, COLUMNS)
    if scale is not None:
        scales = pieces(scale, SIZE, COLUMNS)
    wait(EARLY)
    hold()
    if scale is not None:
        values = normed(x, scales, eps, change, factor, stream, norm, first == 0, SIZE, COLUMNS)
    else:
        values = pieces(x, SIZE, COLUMNS)
    nothing = tl.zeros([CHANNELS, COLUMNS], tl.float32)
    before = add_products(nothing, befores, values, 1.0, SIZE)
    after = add_products(nothing, afters, values, 1.0, SIZE)
    value = add_products(nothing, own, values, 1.0, SIZE)
    # One reduction across the threads for all three.
    gates, values = tl.split(tl.sum(tl.join(tl.join(before, after), tl.join(value, value)), 1))
    before, after = tl.split(gates)
    value, _ = tl.split(values)
    if bias is not None:
        before += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        after += tl.load(bias + channels + channel, mask=real, other=0.0).to(tl.float32)
        value += tl.load(bias + 2 * channels + channel, mask=real, other=0.0).to(tl.float32)
    return before.to(dtype)[:, None], after.to(dtype)[:, None], value.to(dtype)[:, None]
