"""Causal depthwise convolution, with its bias, its SiLU and the gates of a short convolution.

There is one kernel for decodes, one for longer rows, and one for steps whose longer rows all have a few tokens, such as
drafts. (Few decodes of a short convolution use another, fused with the matmul before it, in `short_conv.py`.)

A row's earlier inputs come from its tail or from the checkpoint before its cell, or are zeros before position 0.
Only one program per row and block of channels reads or writes the tail. Longer rows are processed in blocks of a
cell's length that start where the row does, so that only the first block reads inputs from before the row. The
programs of a row's i-th piece compute its block i, and write the captured window at that piece's end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.launch.arguments import STEP, pieces_of, records_drafts, rows_of, window_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.recurrent.tails import place_of
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ConvolutionWeights

# Channels per program and its warps, measured on an H200: for few decodes (total number of values), for many, for
# longer rows, where several programs split a block, and for rows of up to `FEW_TOKENS` in steps without longer ones.
FEW, FEW_CHANNELS, FEW_WARPS = 1 << 17, 128, 1
MANY_CHANNELS, MANY_WARPS = 256, 1
CHANNELS, WARPS, SPLITS = 256, 2, 4
FEW_TOKENS, SHORT_CHANNELS, SHORT_WARPS = 16, 1024, 4
# The widest filter of published models; up to it, longer rows keep their inputs in registers.
UNROLLED = tl.constexpr(4)


class Gates(NamedTuple):
    """Gates, each with the convolution's shape and strides. `before` multiplies the input, `after` the sum."""

    before: Float[Tensor, "tokens channels"]
    after: Float[Tensor, "tokens channels"]


def causal_conv(
    x: Float[Tensor, "tokens channels"],
    weights: ConvolutionWeights,
    batch: Batch,
    view: RecurrentView,
    gates: Gates | None = None,
) -> Float[Tensor, "tokens channels"]:
    weight, bias, activation = weights.taps, weights.bias, weights.activation
    tail = view.tail["conv"]
    (tokens, channels), width = x.shape, weight.shape[1]
    before, after = (None, None) if gates is None else gates
    assert x.stride(1) == 1
    assert gates is None or gates.before.stride() == gates.after.stride() == x.stride()
    assert width - 1 <= batch.cell
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    given = named(
        x=x, x_stride=x.stride(0), before=before, after=after, weight=weight, weight_channel=weight.stride(0),
        weight_tap=weight.stride(1), bias=bias, y=y, channels=channels, ring=tail.shape[1], cell=batch.cell,
    )  # fmt: skip
    if batch.decodes:
        few = batch.decodes * channels <= FEW
        block, warps = (FEW_CHANNELS, FEW_WARPS) if few else (MANY_CHANNELS, MANY_WARPS)
        decode_kernel[(batch.decodes, -(-channels // block))](
            given, window_of(view), rows_of(batch),
            WIDTH=width, SILU=activation, CHANNELS=block, num_warps=warps, **early(x),
        )  # fmt: skip
    if batch.pieces:
        if records_drafts(batch, min(FEW_TOKENS, batch.cell, tail.shape[1])) and width <= UNROLLED.value:
            short_kernel[(batch.rows - batch.decodes, -(-channels // SHORT_CHANNELS))](
                given, window_of(view), rows_of(batch), pieces_of(batch),
                WIDTH=width, SILU=activation, CHANNELS=SHORT_CHANNELS, LONGEST=batch.longest, num_warps=SHORT_WARPS,
                **early(x),
            )  # fmt: skip
            return y
        # The first program of a row must hold all tokens that read inputs from before the row.
        splits = SPLITS if batch.cell >= SPLITS * (width - 1) else 1
        extend_kernel[(batch.pieces, -(-channels // CHANNELS), splits)](
            given, window_of(view), rows_of(batch), pieces_of(batch),
            WIDTH=width, SILU=activation, CHANNELS=CHANNELS, SPLITS=splits, num_warps=WARPS,
        )  # fmt: skip
    return y


@triton.jit
def load_new(x, before, token, x_stride, channel, mask):
    """Load the input, rounded to the dtype in which it is stored, even after a gate multiplies it."""
    offset = tl.cast(token, tl.int64) * x_stride + channel
    value = tl.load(x + offset, mask=mask, other=0.0)
    if before is not None:
        gate = tl.load(before + offset, mask=mask, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * gate).to(x.dtype.element_ty)
    return value


class Earlier(NamedTuple):
    """Inputs from before a row, which starts at `start`. Its cell starts at `opening`, where the window ends."""

    start: tl.tensor
    opening: tl.tensor
    tail: tl.tensor
    window: tl.tensor
    ring: tl.tensor


@triton.jit
def earlier_of(at, state, state_stride, tail_conv, tail_conv_stride, ring):
    tail, window = tail_conv + at.tail * tail_conv_stride, state + at.slot * state_stride
    return Earlier(start=at.start, opening=at.start - at.offset, tail=tail, window=window, ring=ring)


@triton.jit
def load_earlier(earlier, position, channel, channels, real, WIDTH: tl.constexpr):
    """Load the input at a position before a row."""
    in_tail = position >= earlier.opening
    in_window = (position >= 0) & (position < earlier.opening)
    # A negative remainder would be an invalid index, even if nothing is read there.
    here = tl.maximum(position, 0) % earlier.ring
    recent = tl.load(earlier.tail + here * channels + channel, mask=real & in_tail, other=0.0)
    line = position - earlier.opening + WIDTH - 1
    older = tl.load(earlier.window + line * channels + channel, mask=real & in_window, other=0.0)
    return tl.where(in_tail, recent, older)


@triton.jit
def load_taps(weight, tap, channel, weight_channel, weight_tap, real):
    return tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0).to(tl.float32)


@triton.jit
def sum_earlier(earlier, weight, weight_channel, weight_tap, channel, channels, real, WIDTH: tl.constexpr):
    """Sum what the inputs before a decode add to its output, oldest first, for one row or for [channels, rows]."""
    total = tl.zeros(real.shape, tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        value = load_earlier(earlier, earlier.start - (WIDTH - 1) + tap, channel, channels, real, WIDTH)
        taps = load_taps(weight, tap, channel, weight_channel, weight_tap, channel < channels)
        total += value.to(tl.float32) * taps
    return total


@triton.jit
def store_window(closed, new, earlier, channel, channels, real, WIDTH: tl.constexpr):
    """Store the inputs up to a decode that closes its cell, the new one last."""
    for index in tl.static_range(WIDTH - 2):
        value = load_earlier(earlier, earlier.start + 2 - WIDTH + index, channel, channels, real, WIDTH)
        tl.store(closed + index * channels + channel, value, mask=real)
    tl.store(closed + (WIDTH - 2) * channels + channel, new, mask=real)


@triton.jit
def finish(total, offset, after, token, x_stride, channel, real, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        total += offset
    if SILU:
        total = total * tl.sigmoid(total)
    if after is not None:
        total *= tl.load(after + tl.cast(token, tl.int64) * x_stride + channel, mask=real, other=0.0).to(tl.float32)
    return total


@jit(**STEP)
def decode_kernel(
    x, x_stride, before, after, weight, weight_channel, weight_tap, bias, y, channels, ring, cell,
    state, state_stride, tail_conv, tail_conv_stride, row_start, row_first, row_slot, row_tail, row_closing,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, cell)
    earlier = earlier_of(at, state, state_stride, tail_conv, tail_conv_stride, ring)
    offset = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32) if bias is not None else 0.0
    total = sum_earlier(earlier, weight, weight_channel, weight_tap, channel, channels, real, WIDTH)
    taps = load_taps(weight, WIDTH - 1, channel, weight_channel, weight_tap, real)
    # Everything older than this step's projection is loaded; now load the projection.
    wait(EARLY)
    new = load_new(x, before, row, x_stride, channel, real)
    total += new.to(tl.float32) * taps
    total = finish(total, offset, after, row, x_stride, channel, real, bias is not None, SILU)
    tl.store(y + row.to(tl.int64) * channels + channel, total.to(y.dtype.element_ty), mask=real)
    if at.closing >= 0:
        store_window(state + at.closing * state_stride, new, earlier, channel, channels, real, WIDTH)
    # The ring is no longer than what was just read: the new input replaces the oldest.
    tl.debug_barrier()
    tl.store(earlier.tail + (at.start % ring) * channels + channel, new, mask=real)


@triton.jit
def load_any(x, before, earlier, token, x_stride, channel, channels, real, WIDTH: tl.constexpr):
    """Load the input of a row's token, counted from its start; for negative counts, an input from before the row."""
    value = load_new(x, before, token, x_stride, channel, real & (token >= 0))
    if token < 0:
        value = load_earlier(earlier, earlier.start + token, channel, channels, real, WIDTH)
    return value


@triton.jit
def emit(
    a, b, c, d, taps, offset, after, y, token, high, x_stride, channel, channels, real,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write the output of the token with input d, preceded by c, b and a. Add the oldest first, as decodes do."""
    real = real & (token < high)
    taps_a, taps_b, taps_c, taps_d = taps
    total = tl.zeros_like(taps_d)
    if WIDTH >= 4:
        total += a.to(tl.float32) * taps_a
    if WIDTH >= 3:
        total += b.to(tl.float32) * taps_b
    total += c.to(tl.float32) * taps_c
    total += d.to(tl.float32) * taps_d
    total = finish(total, offset, after, token, x_stride, channel, real, HAS_BIAS, SILU)
    tl.store(y + tl.cast(token, tl.int64) * channels + channel, total.to(y.dtype.element_ty), mask=real)


@triton.jit
def convolve_in_registers(
    x, before, after, weight, bias, y, earlier, low, high, x_stride, weight_channel, weight_tap,
    channel, channels, real, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve four tokens at a time, which load together; the inputs before them stay in registers."""
    taps = load_all_taps(weight, channel, weight_channel, weight_tap, real, WIDTH)
    offset = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32) if bias is not None else 0.0
    c = load_any(x, before, earlier, low - 1, x_stride, channel, channels, real, WIDTH)
    b, a = c, c
    if WIDTH >= 3:
        b = load_any(x, before, earlier, low - 2, x_stride, channel, channels, real, WIDTH)
    if WIDTH >= 4:
        a = load_any(x, before, earlier, low - 3, x_stride, channel, channels, real, WIDTH)
    for index in range(0, high - low, 4):
        token = low + index
        four = load_four(x, before, token, high, x_stride, channel, real)
        emit_four(
            a, b, c, four, taps, offset, after, y, token, high, x_stride, channel, channels, real,
            WIDTH, bias is not None, SILU,
        )  # fmt: skip
        a, b, c = four[1], four[2], four[3]


@triton.jit
def load_all_taps(weight, channel, weight_channel, weight_tap, real, WIDTH: tl.constexpr):
    """Load the taps of four inputs, the newest last; those beyond WIDTH are not used."""
    d = load_taps(weight, WIDTH - 1, channel, weight_channel, weight_tap, real)
    c = load_taps(weight, WIDTH - 2, channel, weight_channel, weight_tap, real)
    b = load_taps(weight, WIDTH - 3, channel, weight_channel, weight_tap, real) if WIDTH >= 3 else c
    a = load_taps(weight, WIDTH - 4, channel, weight_channel, weight_tap, real) if WIDTH >= 4 else c
    return a, b, c, d


@triton.jit
def load_four(x, before, token, high, x_stride, channel, real):
    """Load the inputs of four tokens, of those before `high`."""
    d = load_new(x, before, token, x_stride, channel, real & (token < high))
    e = load_new(x, before, token + 1, x_stride, channel, real & (token + 1 < high))
    f = load_new(x, before, token + 2, x_stride, channel, real & (token + 2 < high))
    g = load_new(x, before, token + 3, x_stride, channel, real & (token + 3 < high))
    return d, e, f, g


@triton.jit
def emit_four(
    a, b, c, four, taps, offset, after, y, token, high, x_stride, channel, channels, real,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write the outputs of four tokens, preceded by c, b and a, of those before `high`."""
    d, e, f, g = four
    # fmt: off
    emit(a, b, c, d, taps, offset, after, y, token, high, x_stride, channel, channels, real, WIDTH, HAS_BIAS, SILU)
    emit(b, c, d, e, taps, offset, after, y, token + 1, high, x_stride, channel, channels, real, WIDTH, HAS_BIAS, SILU)
    emit(c, d, e, f, taps, offset, after, y, token + 2, high, x_stride, channel, channels, real, WIDTH, HAS_BIAS, SILU)
    emit(d, e, f, g, taps, offset, after, y, token + 3, high, x_stride, channel, channels, real, WIDTH, HAS_BIAS, SILU)
    # fmt: on


@jit(**STEP)
def short_kernel(
    x, x_stride, before, after, weight, weight_channel, weight_tap, bias, y, channels, ring, cell,
    state, state_stride, tail_conv, tail_conv_stride, row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, LONGEST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels). Rows of up to LONGEST tokens fit into their tails; longer ones are padding."""
    row, channel = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    at = place_of(row + decodes, row_start, row_first, row_slot, row_tail, row_closing, cell)
    length = tl.where(at.end - at.start <= LONGEST, at.end - at.start, 0)
    # A row without tokens has no piece.
    slot = tl.load(piece_slot + tl.load(first_piece + row), at.offset + length >= cell, -1)
    earlier = earlier_of(at, state, state_stride, tail_conv, tail_conv_stride, ring)
    first = at.first.to(tl.int64)
    x += first * x_stride
    y += first * channels
    if before is not None:
        before += first * x_stride
    if after is not None:
        after += first * x_stride
    taps = load_all_taps(weight, channel, weight_channel, weight_tap, real, WIDTH)
    offset = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32) if bias is not None else 0.0
    c = load_earlier(earlier, at.start - 1, channel, channels, real, WIDTH)
    b = load_earlier(earlier, at.start - 2, channel, channels, real, WIDTH) if WIDTH >= 3 else c
    a = load_earlier(earlier, at.start - 3, channel, channels, real, WIDTH) if WIDTH >= 4 else c
    wait(EARLY)
    # Ask for the first inputs before anything waits for older ones.
    d, e, f, g = load_four(x, before, 0, length, x_stride, channel, real)
    if slot >= 0:
        captured = state + slot.to(tl.int64) * state_stride + channel
        for place in tl.static_range(WIDTH - 1):
            source = cell - at.offset - (WIDTH - 1) + place
            value = load_any(x, before, earlier, source, x_stride, channel, channels, real, WIDTH)
            tl.store(captured + place * channels, value, mask=real)
    # Everything that is needed of this tail has been read: new inputs may replace it.
    tl.debug_barrier()
    for token in range(0, length, 4):
        four = d, e, f, g
        emit_four(
            a, b, c, four, taps, offset, after, y, token, length, x_stride, channel, channels, real,
            WIDTH, bias is not None, SILU,
        )  # fmt: skip
        for index in tl.static_range(4):
            kept = earlier.tail + ((at.start + token + index) % ring) * channels + channel
            tl.store(kept, four[index], mask=real & (token + index < length))
        a, b, c = e, f, g
        d, e, f, g = load_four(x, before, token + 4, length, x_stride, channel, real)
    # Padding has finite outputs.
    for token in range(length, at.end - at.start):
        tl.store(y + tl.cast(token, tl.int64) * channels + channel, tl.zeros([CHANNELS], y.dtype.element_ty), mask=real)


@triton.jit
def convolve_tap_by_tap(
    x, before, after, weight, bias, y, earlier, low, high, x_stride, weight_channel, weight_tap,
    channel, channels, real, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve with any width: load every input once for each of its taps."""
    offset = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32) if bias is not None else 0.0
    for index in range(high - low):
        token = low + index
        total = tl.zeros(real.shape, tl.float32)
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            value = load_any(x, before, earlier, source, x_stride, channel, channels, real, WIDTH)
            total += value.to(tl.float32) * load_taps(weight, tap, channel, weight_channel, weight_tap, real)
        total = finish(total, offset, after, token, x_stride, channel, real, bias is not None, SILU)
        tl.store(y + token.to(tl.int64) * channels + channel, total.to(y.dtype.element_ty), mask=real)


@jit(**STEP)
def extend_kernel(
    x, x_stride, before, after, weight, weight_channel, weight_tap, bias, y, channels, ring, cell,
    state, state_stride, tail_conv, tail_conv_stride, row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (piece, block of channels, part of the piece's tokens)."""
    piece = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    row = tl.load(piece_row + piece)
    at = place_of(row, row_start, row_first, row_slot, row_tail, row_closing, cell)
    earlier = earlier_of(at, state, state_stride, tail_conv, tail_conv_stride, ring)
    slot, length = tl.load(piece_slot + piece), at.end - at.start
    first = at.first.to(tl.int64)
    x += first * x_stride
    y += first * channels
    if before is not None:
        before += first * x_stride
    if after is not None:
        after += first * x_stride
    # This program's tokens, counted from the row's start.
    block = (piece - tl.load(first_piece + row - decodes)) * cell
    span = (cell + SPLITS - 1) // SPLITS
    low = block + tl.program_id(2) * span
    high = tl.minimum(tl.minimum(low + span, block + cell), length)
    # A row captured at a piece's end has tokens in the block of the same number.
    if low >= high:
        return
    if WIDTH <= UNROLLED:
        convolve_in_registers(
            x, before, after, weight, bias, y, earlier, low, high, x_stride, weight_channel, weight_tap,
            channel, channels, real, WIDTH, SILU,
        )  # fmt: skip
    else:
        convolve_tap_by_tap(
            x, before, after, weight, bias, y, earlier, low, high, x_stride, weight_channel, weight_tap,
            channel, channels, real, WIDTH, SILU,
        )  # fmt: skip
    if (slot >= 0) & (low == block):
        end = tl.load(piece_position + piece) + cell - at.start
        captured = state + slot.to(tl.int64) * state_stride + channel
        for place in tl.static_range(WIDTH - 1):
            source = end - (WIDTH - 1) + place
            value = load_any(x, before, earlier, source, x_stride, channel, channels, real, WIDTH)
            tl.store(captured + place * channels, value, mask=real)
    if low == 0:
        # This program has already read everything it needs from this tail, above.
        tl.debug_barrier()
        oldest = tl.maximum(length - ring, 0)
        for newer in range(tl.minimum(length, ring)):
            kept = oldest + newer
            value = load_new(x, before, kept, x_stride, channel, real)
            tl.store(earlier.tail + ((at.start + kept) % ring) * channels + channel, value, mask=real)
