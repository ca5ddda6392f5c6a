"""Causal depthwise convolution on lanes, with its bias, its SiLU and the gates around a short one: one kernel each for
decodes and for longer rows.

A row's earlier inputs come from its tail, from the checkpoint before its cell, or are zeros before position 0; only
one program per row and block of channels looks at the tail or writes it. Longer rows are taken in blocks of a cell's
length that start where the row does, so that only the first of them looks back beyond the row: block i of a row is
done by the program of its i-th piece, which also hands out the window at that piece's end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch
from weft.kernels.cuda.overlap import early, wait
from weft.memory.device.store import RecurrentView

# Channels of a program, tokens that it takes at a time, and its warps; measured on an H200.
DECODE_CHANNELS, DECODE_WARPS = 256, 1
CHANNELS, TOKENS, WARPS = 128, 16, 4
# They lie anywhere in a step's upload, and a kernel must not be compiled for every place that they may have.
LANES = (
    "row_start", "row_first", "row_slot", "row_tail", "row_closing", "piece_row", "piece_position", "piece_slot",
    "first_piece",
)  # fmt: skip


class Gates(NamedTuple):
    """Each has the convolution's shape, and the same strides as its input. `before` multiplies it, `after` the sum."""

    before: Float[Tensor, "tokens channels"]
    after: Float[Tensor, "tokens channels"]


def causal_conv(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None,
    activation: bool,
    batch: Batch,
    view: RecurrentView,
    gates: Gates | None = None,
) -> Float[Tensor, "tokens channels"]:
    """Rows of x may be strided, as a slice of a wider product is."""
    lanes = batch.lanes
    assert lanes is not None
    state, tail = view.state["conv"], view.tail["conv"]
    tokens, channels = x.shape
    width = weight.shape[1]
    before, after = (None, None) if gates is None else gates
    assert x.stride(1) == 1
    assert all(g.stride() == x.stride() for g in (gates or ()))
    assert width - 1 <= lanes.cell
    assert state.shape[1:] == (width - 1, channels)
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    common = (
        x, before, after, weight, bias, y, state, tail, lanes.start, lanes.first, lanes.slot, lanes.tail,
    )  # fmt: skip
    sizes = (
        x.stride(0), weight.stride(0), weight.stride(1), state.stride(0), tail.stride(0),
        channels, tail.shape[1], lanes.cell,
    )  # fmt: skip
    if lanes.decodes:
        blocks = triton.cdiv(channels, DECODE_CHANNELS)
        decode_kernel[(lanes.decodes, blocks)](
            *common, lanes.closing, *sizes,
            WIDTH=width, SILU=activation, CHANNELS=DECODE_CHANNELS, num_warps=DECODE_WARPS, **early(x),
        )  # fmt: skip
    if lanes.pieces:
        extend_kernel[(lanes.pieces, triton.cdiv(channels, CHANNELS))](
            *common, lanes.piece_row, lanes.piece_position, lanes.piece_slot, lanes.first_piece, lanes.decodes, *sizes,
            WIDTH=width, SILU=activation, TOKENS=min(TOKENS, triton.next_power_of_2(lanes.cell)), CHANNELS=CHANNELS,
            num_warps=WARPS,
        )  # fmt: skip
    return y


@triton.jit
def load_inputs(x, before, offset, mask):
    """What is convolved, and remembered: rounded to the dtype that it is remembered in, also if a gate multiplies."""
    value = tl.load(x + offset, mask=mask, other=0.0)
    if before is not None:
        gate = tl.load(before + offset, mask=mask, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * gate).to(x.dtype.element_ty)
    return value


@triton.jit
def load_earlier(tail, window, position, opening, ring, channel, channels, mask, WIDTH: tl.constexpr):
    """Inputs before a row, by position. `opening` is where the row's cell starts. Zeros where `mask` is not."""
    in_tail = mask & (position >= opening)
    in_window = mask & (position >= 0) & (position < opening)
    # Never a negative remainder: those are masked.
    place = tl.maximum(position, 0) % ring
    recent = tl.load(tail + place * channels + channel, mask=in_tail, other=0.0)
    older = tl.load(window + (position - opening + WIDTH - 1) * channels + channel, mask=in_window, other=0.0)
    return tl.where(in_tail, recent, older)


@triton.jit
def finish(total, bias, channel, real, SILU: tl.constexpr):
    if bias is not None:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    return total


@triton.jit(do_not_specialize_on_alignment=LANES)
def decode_kernel(
    x, before, after, weight, bias, y, state, tail, row_start, row_first, row_slot, row_tail, row_closing,
    x_stride, weight_channel, weight_tap, state_stride, tail_stride, channels, ring, cell,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    start = tl.load(row_start + row)
    closing = tl.load(row_closing + row)
    opening = start - start % cell
    tail += tl.load(row_tail + row).to(tl.int64) * tail_stride
    window = state + tl.load(row_slot + row).to(tl.int64) * state_stride
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        position = start - (WIDTH - 1) + tap
        earlier = load_earlier(tail, window, position, opening, ring, channel, channels, real, WIDTH)
        weights = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
        total += earlier.to(tl.float32) * weights.to(tl.float32)
    weights = tl.load(weight + channel * weight_channel + (WIDTH - 1) * weight_tap, mask=real, other=0.0)
    # What is older than this step's projection is here; now the projection.
    wait(EARLY)
    offset = row.to(tl.int64) * x_stride + channel
    new = load_inputs(x, before, offset, real)
    total += new.to(tl.float32) * weights.to(tl.float32)
    total = finish(total, bias, channel, real, SILU)
    if after is not None:
        total *= tl.load(after + offset, mask=real, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * channels + channel, total.to(y.dtype.element_ty), mask=real)
    if closing >= 0:
        closed = state + closing.to(tl.int64) * state_stride + channel
        for index in tl.static_range(WIDTH - 2):
            position = start + 2 - WIDTH + index
            earlier = load_earlier(tail, window, position, opening, ring, channel, channels, real, WIDTH)
            tl.store(closed + index * channels, earlier, mask=real)
        tl.store(closed + (WIDTH - 2) * channels, new, mask=real)
    # The ring is no longer than what was just read: the new input takes the place of the oldest.
    tl.debug_barrier()
    tl.store(tail + (start % ring) * channels + channel, new, mask=real)


@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=LANES)
def extend_kernel(
    x, before, after, weight, bias, y, state, tail, row_start, row_first, row_slot, row_tail,
    piece_row, piece_position, piece_slot, first_piece, decodes,
    x_stride, weight_channel, weight_tap, state_stride, tail_stride, channels, ring, cell,
    WIDTH: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row = tl.load(piece_row + piece)
    block = piece - tl.load(first_piece + row - decodes)
    start = tl.load(row_start + row)
    opening = start - start % cell
    first = tl.load(row_first + row).to(tl.int64)
    length = tl.load(row_first + row + 1) - tl.load(row_first + row)
    tail += tl.load(row_tail + row).to(tl.int64) * tail_stride
    window = state + tl.load(row_slot + row).to(tl.int64) * state_stride
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    x += first * x_stride
    if before is not None:
        before += first * x_stride
    if after is not None:
        after += first * x_stride
    y += first * channels
    for low in range(block * cell, tl.minimum(block * cell + cell, length), TOKENS):
        token = (low + tl.arange(0, TOKENS))[:, None]
        inside = (token < tl.minimum(block * cell + cell, length)) & real[None, :]
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            offset = source.to(tl.int64) * x_stride + channel[None, :]
            value = load_inputs(x, before, offset, inside & (source >= 0))
            if low == 0:
                earlier = load_earlier(
                    tail, window, start + source, opening, ring, channel[None, :], channels,
                    inside & (source < 0), WIDTH,
                )  # fmt: skip
                value = tl.where(source >= 0, value, earlier)
            weights = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
            total += value.to(tl.float32) * weights.to(tl.float32)[None, :]
        total = finish(total, bias, channel[None, :], real[None, :], SILU)
        if after is not None:
            total *= tl.load(after + token.to(tl.int64) * x_stride + channel[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(
            y + token.to(tl.int64) * channels + channel[None, :], total.to(y.dtype.element_ty), mask=inside
        )  # fmt: skip
    slot = tl.load(piece_slot + piece)
    if slot >= 0:
        end = tl.load(piece_position + piece) + cell - start
        captured = state + slot.to(tl.int64) * state_stride + channel
        for index in tl.static_range(WIDTH - 1):
            source = end - (WIDTH - 1) + index
            value = load_inputs(x, before, source.to(tl.int64) * x_stride + channel, real & (source >= 0))
            earlier = load_earlier(
                tail, window, start + source, opening, ring, channel, channels, real & (source < 0), WIDTH
            )
            tl.store(captured + index * channels, tl.where(source >= 0, value, earlier), mask=real)
    if block == 0:
        # All that is read of the tail was read above, by this program.
        tl.debug_barrier()
        oldest = tl.maximum(length - ring, 0).to(tl.int64)
        for index in range(tl.minimum(length, ring)):
            source = oldest + index
            value = load_inputs(x, before, source * x_stride + channel, real)
            tl.store(tail + ((start + source) % ring) * channels + channel, value, mask=real)
