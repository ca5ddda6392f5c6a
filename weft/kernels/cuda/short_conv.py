"""The gated short convolution of few decodes together with the product before it, in one kernel.

A program takes some channels of all rows: it multiplies the weights of what gates them before, of what gates them after
and of themselves, and convolves what it has found while that is still in registers. So nobody waits for a product to be
complete, and what a decode costs beyond reading the weights is one kernel instead of two.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch
from weft.kernels.cuda.causal_conv import LANES, WIDTHS, load_taps, store_window, sum_earlier
from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.linear import INPUTS, are_few, rows_compiled, summed_products
from weft.kernels.cuda.overlap import early
from weft.kernels.lanes import Lanes
from weft.memory.device.store import RecurrentView

# Measured on an H200, on whole steps of a model of 2,048 channels. Channels of a program: three outputs each, and a
# fourth that is not there, for sizes are powers of two. Weights are read so many steps ahead.
CHANNELS = 16
STAGES = 4


def suits(x: Float[Tensor, "rows inputs"], projection: Float[Tensor, "projected inputs"], lanes: Lanes) -> bool:
    """Whether `projected_short_conv` can take them: few rows, all of them decodes."""
    return lanes.pieces == 0 and are_few(x, projection)


def projected_short_conv(
    x: Float[Tensor, "rows inputs"],
    projection: Float[Tensor, "projected inputs"],
    projection_bias: Float[Tensor, " projected"] | None,
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    batch: Batch,
    view: RecurrentView,
) -> Float[Tensor, "rows channels"]:
    lanes = batch.lanes
    assert lanes is not None
    state, tail = view.state["conv"], view.tail["conv"]
    (rows, inputs), (channels, width) = x.shape, weight.shape
    assert rows == lanes.decodes
    assert len(projection) == 3 * channels
    assert width in WIDTHS, f"a convolution of width {width}"
    assert width - 1 <= lanes.cell
    compiled = rows_compiled(rows)
    y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    short_conv_kernel[(-(-channels // CHANNELS),)](
        x, projection, projection_bias, weight, bias, y, state, tail,
        lanes.start, lanes.slot, lanes.tail, lanes.closing,
        x.stride(0), *weight.stride(), state.stride(0), tail.stride(0),
        rows, inputs, channels, tail.shape[1], lanes.cell,
        ROWS=compiled, CHANNELS=CHANNELS, INPUTS=INPUTS, WIDTH=width, EVEN=inputs % INPUTS == 0,
        num_warps=4, num_stages=STAGES, **early(x),
    )  # fmt: skip
    return y


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=LANES)
def short_conv_kernel(
    x, projection, projection_bias, weight, bias, y, state, tail, row_start, row_slot, row_tail, row_closing,
    x_stride, weight_channel, weight_tap, state_stride, tail_stride, rows, inputs, channels, ring, cell,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y.dtype.element_ty
    first = tl.program_id(0) * CHANNELS
    row = tl.arange(0, ROWS)
    is_row = row < rows
    channel = (first + tl.arange(0, CHANNELS))[:, None]
    is_channel = channel < channels
    real = is_channel & is_row[None, :]
    # Rows, tails, windows and weights are older than the kernel before this one.
    start = tl.load(row_start + row, mask=is_row, other=0)[None, :]
    closing = tl.load(row_closing + row, mask=is_row, other=-1)[None, :]
    opening = start - start % cell
    tail += tl.load(row_tail + row, mask=is_row, other=0)[None, :].to(tl.int64) * tail_stride
    window = state + tl.load(row_slot + row, mask=is_row, other=0)[None, :].to(tl.int64) * state_stride
    offset = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32) if bias is not None else 0.0
    total = sum_earlier(
        tail, window, weight, start, opening, ring, weight_channel, weight_tap, channel, channels, real, WIDTH
    )
    taps = load_taps(weight, WIDTH - 1, channel, weight_channel, weight_tap, is_channel)
    # A channel's outputs lie beside each other: what gates it before, what gates it after, itself, nothing.
    number = tl.arange(0, 4 * CHANNELS)
    part = number % 4
    output = first + number // 4
    is_output = (output < channels) & (part < 3)
    output += part * channels
    products = summed_products(
        x, projection, output, is_output, row, is_row, 0, inputs, inputs, x_stride,
        ROWS, 4 * CHANNELS, INPUTS, EVEN, EARLY,
    )  # fmt: skip
    if projection_bias is not None:
        products += tl.load(projection_bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # Rounded where a product by itself is.
    parts = tl.permute(tl.reshape(products.to(dtype), (CHANNELS, 4, ROWS)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(parts, (CHANNELS, ROWS, 2, 2)))
    before, value = tl.split(even)
    after, _ = tl.split(odd)
    new = (value.to(tl.float32) * before.to(tl.float32)).to(dtype)
    total += new.to(tl.float32) * taps
    if bias is not None:
        total += offset
    total *= after.to(tl.float32)
    tl.store(y + row[None, :] * channels + channel, total.to(dtype), mask=real)
    closed = state + closing.to(tl.int64) * state_stride
    store_window(closed, new, tail, window, start, opening, ring, channel, channels, real & (closing >= 0), WIDTH)
    # The ring is no longer than what was read: the new input takes the place of the oldest.
    tl.debug_barrier()
    tl.store(tail + (start % ring) * channels + channel, new, mask=real)
