"""Sums of products with packed weights, for kernels of any operation: few instructions make bfloat16 of their codes.

Tensor cores multiply codes as they are, as numbers times a power of two; scales of FP8 multiply the sum of 128 inputs
in float32. Powers of two of MXFP4 multiply the codes, which stay exact. With `FOLD` weights are first decoded and
rounded to the dtype of the inputs, and a sum is one chain over the inputs, whatever the tile: exact mode and dtypes
other than bfloat16.

A tile of weights is loaded as words, and pairs of their codes become tiles of their own. All of that works element by
element, so the compiler may lay out words as tensor cores want their operand: no weight passes through shared memory
twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from weft.kernels.cuda.formats.packed import FP8_FACTOR, FP8_PLACES, LINES, MXFP4_FACTOR, MXFP4_PLACES, CodeTiles
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.formats.stored import DENSE, Stored

# Triton's interpreter runs no assembly, and is wrong in bfloat16: it decodes in float32.
PORTABLE = tl.constexpr(bool(knobs.runtime.interpret))
TILE, STEP = tl.constexpr(LINES), tl.constexpr(TILE_INPUTS)
# What makes two bfloat16 of a pair of codes of a word. `packed.py` says where their bits are.
FP8_MOVES = (
    "and.b32 $0, $1, 0x87f087f0;",
    "{ .reg .b32 u, v; shr.b32 u, $1, 4; and.b32 u, u, 0x07000700; shl.b32 v, $1, 4; and.b32 v, v, 0x80f080f0;"
    " or.b32 $0, u, v; }",
)
MXFP4_MOVES = (
    "and.b32 $0, $1, 0x81c081c0;",
    "{ .reg .b32 u; shl.b32 u, $1, 3; and.b32 $0, u, 0x81c081c0; }",
    "{ .reg .b32 u; shl.b32 u, $1, 6; and.b32 $0, u, 0x81c081c0; }",
    "{ .reg .b32 u, v; shl.b32 u, $1, 1; and.b32 u, u, 0x80008000; shr.b32 v, $1, 3; and.b32 v, v, 0x01800180;"
    " or.b32 u, u, v; shr.b32 v, $1, 7; and.b32 v, v, 0x00400040; or.b32 $0, u, v; }",
)
FP8_ASSEMBLY, MXFP4_ASSEMBLY = tl.constexpr(FP8_MOVES), tl.constexpr(MXFP4_MOVES)
# The sign of a code is its highest bit; those below it end at bits 4 and 6 of a bfloat16.
FP8_RUNS = tl.constexpr(
    tuple(tuple((there, (1 << n) - 1, 15 if here == 7 else here + 4) for here, there, n in runs) for runs in FP8_PLACES)
)
MXFP4_RUNS = tl.constexpr(
    tuple(
        tuple((there, (1 << n) - 1, 15 if here == 3 else here + 6) for here, there, n in runs) for runs in MXFP4_PLACES
    )
)
# What restores the numbers: see `packed.py`.
FP8_UNIT, MXFP4_UNIT = tl.constexpr(2.0**FP8_FACTOR), tl.constexpr(2.0**MXFP4_FACTOR)


def form_of(stored: Stored) -> dict[str, str | int] | None:
    """Return the constants of kernels that read this matrix; None if they cannot."""
    form = stored.format
    if form is DENSE:
        return {"FORMAT": "dense", "BLOCK_ROWS": 0}
    if not isinstance(form, CodeTiles):
        return None
    return {"FORMAT": "fp8" if form.is_fp8 else "mxfp4", "BLOCK_ROWS": form.block_rows or 0}


@triton.jit
def of_expert(codes, scales, expert, outputs, inputs, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return where the matrix of an expert begins."""
    number, steps, lines = expert.to(tl.int64), tl.cdiv(inputs, STEP), tl.cdiv(outputs, TILE) * TILE
    if FORMAT == "fp8":
        codes += number * lines * steps * (STEP // 4)
        scales += number * tl.cdiv(outputs, BLOCK_ROWS) * steps if BLOCK_ROWS > 0 else number * lines
    elif FORMAT == "mxfp4":
        codes += number * lines * steps * (STEP // 8)
        scales += number * lines * steps
    else:
        codes += number * outputs * inputs
    return codes, scales


@triton.jit
def summed(
    values, is_row, codes, scales, output, inputs, first, last,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sums [outputs, rows] over the tiles of inputs from `first` to `last`, in order. Float32.

    `values` are the addresses of rows. Lines of `output` beyond the matrix must be valid ones instead.
    """
    total = tl.zeros((ROWS, OUTPUTS) if ROWS_FIRST else (OUTPUTS, ROWS), tl.float32)
    if FORMAT == "dense":
        column = tl.arange(0, STEP)
        places = codes + output.to(tl.int64) * inputs
        for step in range(first, last):
            is_input = (column + step * STEP < inputs)[None, :]
            place = places[:, None] + (column + step * STEP)[None, :]
            tile = tl.load(place) if EVEN else tl.load(place, mask=is_input, other=0.0)
            value = rows_at(values, is_row, column + step * STEP, inputs, ROWS_FIRST, EVEN)
            total = multiplied(value, tile, total, True, ROWS_FIRST)
        return tl.trans(total) if ROWS_FIRST else total
    PAIRS: tl.constexpr = 2 if FORMAT == "fp8" else 4
    WORDS: tl.constexpr = STEP // (2 * PAIRS)
    LATER: tl.constexpr = FORMAT == "fp8" and BLOCK_ROWS > 0 and not FOLD
    word, column = tl.arange(0, WORDS), tl.arange(0, 2 * WORDS)
    places = words_of(codes, output, 0, inputs, WORDS)
    owned, stride = scales_of(scales, output, inputs, FORMAT, BLOCK_ROWS)
    scale = tl.load(owned + first * stride)
    for step in range(first, last):
        words = tl.load(places[:, None] + (word + step * (TILE * WORDS))[None, :], eviction_policy="evict_first")
        used = scale
        if FORMAT == "mxfp4":
            used = tl.load(owned + step * stride)
        elif BLOCK_ROWS > 0:
            # Read a step ahead: no copy unit prefetches what does not reach a tensor core.
            scale = tl.load(owned + tl.minimum(step + 1, last - 1) * stride)
        part = tl.zeros_like(total) if LATER else total
        for pair in tl.static_range(PAIRS):
            tile = numbers_of(words, used, pair, FORMAT, FOLD, OUTPUTS)
            value = rows_at(values, is_row, column + (step * STEP + pair * 2 * WORDS), inputs, ROWS_FIRST, EVEN)
            part = multiplied(value, tile, part, FOLD, ROWS_FIRST)
        if LATER:
            total += part * (used[None, :] if ROWS_FIRST else used[:, None])
        else:
            total = part
    if ROWS_FIRST:
        total = tl.trans(total)
    if not FOLD:
        total = total * (FP8_UNIT if FORMAT == "fp8" else MXFP4_UNIT)
        if FORMAT == "fp8" and BLOCK_ROWS == 0:
            total = total * scale[:, None]
    return total


@triton.jit
def words_of(codes, output, step, inputs, WORDS: tl.constexpr):
    """Return where the words of lines begin, in the tile of a step."""
    tile = (output // TILE).to(tl.int64) * tl.cdiv(inputs, STEP) + step
    return codes + (tile * TILE + output % TILE) * WORDS


@triton.jit
def scales_of(scales, output, inputs, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return where the scales of lines are in the first step, and how far apart those of two steps are."""
    steps = tl.cdiv(inputs, STEP)
    if FORMAT == "mxfp4":
        owned, stride = scales + (output // TILE).to(tl.int64) * steps * TILE + output % TILE, TILE
    elif BLOCK_ROWS > 0:
        owned, stride = scales + output // BLOCK_ROWS * steps, 1
    else:
        owned, stride = scales + output, 0
    return owned, stride


@triton.jit
def rows_at(values, is_row, column, inputs, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr):
    """Return some inputs of rows: [rows, inputs], or [inputs, rows]."""
    if ROWS_FIRST:
        real = is_row[:, None] if EVEN else is_row[:, None] & (column < inputs)[None, :]
        found = tl.load(values[:, None] + column[None, :], mask=real, other=0.0)
    else:
        real = is_row[None, :] if EVEN else is_row[None, :] & (column < inputs)[:, None]
        found = tl.load(values[None, :] + column[:, None], mask=real, other=0.0)
    return found


@triton.jit
def multiplied(value, tile, total, FOLD: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """Return total + the product of a tile of weights with rows."""
    if FOLD:
        tile = tile.to(value.dtype)
    elif PORTABLE:
        value = value.to(tl.float32)
    if ROWS_FIRST:
        total = tl.dot(value, tl.trans(tile), total, input_precision="ieee")
    else:
        total = tl.dot(tile, value, total, input_precision="ieee")
    return total


@triton.jit
def numbers_of(words, scale, PAIR: tl.constexpr, FORMAT: tl.constexpr, FOLD: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return a pair of codes of each word, side by side: with `FOLD` the weights, otherwise times a power of two."""
    if PORTABLE:
        low, high = assembled(words, 2 * PAIR, FORMAT), assembled(words, 2 * PAIR + 1, FORMAT)
    else:
        text: tl.constexpr = FP8_ASSEMBLY[PAIR] if FORMAT == "fp8" else MXFP4_ASSEMBLY[PAIR]
        both = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tile = tl.reshape(tl.join(low, high), (OUTPUTS, STEP // (2 if FORMAT == "fp8" else 4)))
    if FORMAT == "mxfp4":
        # Four exponents of a line, each of 32 inputs, lie in one word.
        exponent = (scale >> (PAIR * 8)) & 255
        if PORTABLE:
            tile *= (exponent << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            tile *= (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    if FOLD:
        tile = tile.to(tl.float32)
        tile *= (scale * FP8_UNIT)[:, None] if FORMAT == "fp8" else MXFP4_UNIT
    return tile


@triton.jit
def assembled(words, CODE: tl.constexpr, FORMAT: tl.constexpr):
    """Return float32 with the bits of one code of each word. For the interpreter."""
    bits = words * 0
    for there, mask, target in (FP8_RUNS.value if FORMAT == "fp8" else MXFP4_RUNS.value)[CODE]:
        bits |= ((words >> there) & mask) << (16 + target)
    return bits.to(tl.float32, bitcast=True)
