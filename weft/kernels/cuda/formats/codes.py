"""Sums of products with packed weights, for kernels of any operation: few instructions make bfloat16 of their codes.

Tensor cores multiply codes as they are: floats as numbers times a power of two, integers less their zero. Scales of
FP8 and of integers multiply the sum of their inputs in float32. Powers of two, and the scales of NVFP4, multiply the
codes, which stay exact. With `FOLD` weights are first decoded and rounded to the dtype of the inputs, and a sum is one
chain over the inputs, whatever the tile: exact mode and dtypes other than bfloat16.

A tile of weights is loaded as words, and pairs of their codes become tiles of their own. All of that works element by
element, so the compiler may lay out words as tensor cores want their operand: no weight passes through shared memory
twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from weft.kernels.cuda.formats.packed import (
    E2M1_PLACES,
    E4M3_PLACES,
    FACTORS,
    LINES,
    SMALL_OFFSET,
    CodeTiles,
)
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.formats.stored import DENSE, Stored

# Triton's interpreter runs no assembly, and is wrong in bfloat16: it decodes in float32.
PORTABLE = tl.constexpr(bool(knobs.runtime.interpret))
TILE, STEP = tl.constexpr(LINES), tl.constexpr(TILE_INPUTS)

# What makes two bfloat16, $0, of a pair of codes of a word, $1. `packed.py` says where their bits are.
E4M3_MOVES = (
    "and.b32 $0, $1, 0x87f087f0;",
    "{ .reg .b32 u, v; shr.b32 u, $1, 4; and.b32 u, u, 0x07000700; shl.b32 v, $1, 4; and.b32 v, v, 0x80f080f0;"
    " or.b32 $0, u, v; }",
)
E2M1_MOVES = (
    "and.b32 $0, $1, 0x81c081c0;",
    "{ .reg .b32 u; shl.b32 u, $1, 3; and.b32 $0, u, 0x81c081c0; }",
    "{ .reg .b32 u; shl.b32 u, $1, 6; and.b32 $0, u, 0x81c081c0; }",
    "{ .reg .b32 u, v; shl.b32 u, $1, 1; and.b32 u, u, 0x80008000; shr.b32 v, $1, 3; and.b32 v, v, 0x01800180;"
    " or.b32 u, u, v; shr.b32 v, $1, 7; and.b32 v, v, 0x00400040; or.b32 $0, u, v; }",
)
# The same times a pair of powers or scales, $2.
SCALED = "{{ .reg .b32 n, z; mov.b32 z, 0x80008000; {} fma.rn.bf16x2 $0, n, $2, z; }}"
# A code in the mantissa of 128, less 128 and its zero, whose sum with the sign changed is $2.
INT4_MOVES = tuple(
    f"{{ .reg .b32 u, one; {f'shr.b32 u, $1, {shift}; and.b32 u, u,' if shift else 'and.b32 u, $1,'} 0x000f000f;"
    " or.b32 u, u, 0x43004300; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, u, one, $2; }"
    for shift in (0, 4, 8, 12)
)
# Its lowest seven bits in that of 128, less 128 or, without the highest, 256: the zero is 128.
INT8_MOVES = tuple(
    f"{{ .reg .b32 u, v, one; {f'shr.b32 v, $1, {shift};' if shift else 'mov.b32 v, $1;'} and.b32 u, v, 0x007f007f;"
    " or.b32 u, u, 0x43004300; and.b32 v, v, 0x00800080; xor.b32 v, v, 0xc380c380; mov.b32 one, 0x3f803f80;"
    " fma.rn.bf16x2 $0, u, one, v; }"
    for shift in (0, 8)
)
MINUS_128 = 0xC300C300 - (1 << 32)


def scaled(moves: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(SCALED.format(each.replace("$0", "n")) for each in moves)


MOVES = {
    "fp8": E4M3_MOVES,
    "mxfp8": scaled(E4M3_MOVES),
    "mxfp4": scaled(E2M1_MOVES),
    "nvfp4": scaled(E2M1_MOVES),
    "int4": INT4_MOVES,
    "int8": INT8_MOVES,
}
FP8_ASSEMBLY, MXFP8_ASSEMBLY = tl.constexpr(MOVES["fp8"]), tl.constexpr(MOVES["mxfp8"])
FP4_ASSEMBLY = tl.constexpr(MOVES["mxfp4"])
INT4_ASSEMBLY, INT8_ASSEMBLY = tl.constexpr(MOVES["int4"]), tl.constexpr(MOVES["int8"])
# The sign of a code is its highest bit; those below it end at bits 4 and 6 of a bfloat16.
E4M3_RUNS = tl.constexpr(
    tuple(
        tuple((there, (1 << n) - 1, 15 if here == 7 else here + 4) for here, there, n in runs) for runs in E4M3_PLACES
    )
)
E2M1_RUNS = tl.constexpr(
    tuple(
        tuple((there, (1 << n) - 1, 15 if here == 3 else here + 6) for here, there, n in runs) for runs in E2M1_PLACES
    )
)
# What restores the numbers: see `packed.py`.
EIGHT_BITS_UNIT, FOUR_BITS_UNIT = tl.constexpr(2.0 ** FACTORS["fp8"]), tl.constexpr(2.0 ** FACTORS["mxfp4"])
SMALL, CENTER = tl.constexpr(SMALL_OFFSET), tl.constexpr(MINUS_128)
# Rows of a tile of a matmul: sums of more than two parts of a tile of inputs leave room for few.
MOST_ROWS, MOST_ROWS_OF_RUNS = 128, 32


def form_of(stored: Stored) -> dict[str, str | int] | None:
    """Return the constants of kernels that read this matrix; None if they cannot."""
    form = stored.format
    if form is DENSE:
        return {"FORMAT": "dense", "PAIRS": 1, "BLOCK_ROWS": 0, "RUNS": 0}
    if not isinstance(form, CodeTiles):
        return None
    return {"FORMAT": form.kind, "PAIRS": form.pairs, "BLOCK_ROWS": form.block_rows, "RUNS": form.runs}


def most_rows(stored: Stored) -> int:
    """Return the most rows of a tile of a matmul with this matrix."""
    form = stored.format
    return MOST_ROWS_OF_RUNS if isinstance(form, CodeTiles) and form.is_integer and form.runs > 2 else MOST_ROWS


@triton.jit
def of_expert(
    codes, scales, expert, outputs, inputs,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return where the codes and scales of an expert begin."""
    number, steps, lines = expert.to(tl.int64), tl.cdiv(inputs, STEP), tl.cdiv(outputs, TILE) * TILE
    if FORMAT == "dense":
        codes += number * outputs * inputs
    elif FORMAT == "e4m3":
        codes += number * outputs * steps * STEP
        scales += number * (tl.cdiv(outputs, BLOCK_ROWS) * steps if RUNS > 0 else outputs)
    else:
        codes += number * lines * steps * (STEP // (2 * PAIRS))
        if BLOCK_ROWS > 0:
            scales += number * tl.cdiv(outputs, BLOCK_ROWS) * steps
        else:
            scales += number * lines * (steps * RUNS if RUNS > 0 else 1)
    return codes, scales


@triton.jit
def more_of_expert(more, expert, outputs, inputs, FORMAT: tl.constexpr, RUNS: tl.constexpr):
    """Return where the zeros of an expert begin, or the factors of its lines."""
    steps, lines = tl.cdiv(inputs, STEP), tl.cdiv(outputs, TILE) * TILE
    return more + expert.to(tl.int64) * lines * (1 if FORMAT == "nvfp4" else steps * RUNS)


@triton.jit
def summed(
    values, factors, is_row, codes, scales, more, output, inputs, first, last,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sums [outputs, rows] over the tiles of inputs from `first` to `last`, in order. Float32.

    `values` are the addresses of rows; `factors` those of their scales, if they are codes too. Lines of `output` beyond
    the matrix must be valid ones instead.
    """
    total = tl.zeros((ROWS, OUTPUTS) if ROWS_FIRST else (OUTPUTS, ROWS), tl.float32)
    if FORMAT == "dense":
        total = summed_numbers(values, is_row, codes, output, inputs, first, last, total, ROWS_FIRST, EVEN)
    elif FORMAT == "e4m3":
        tl.static_assert(not ROWS_FIRST)
        total = summed_lines(
            values, factors, is_row, codes, scales, output, inputs, first, last, total, BLOCK_ROWS, RUNS
        )
    else:
        total = summed_codes(
            values, is_row, codes, scales, more, output, inputs, first, last, total,
            FORMAT, PAIRS, BLOCK_ROWS, RUNS, FOLD, OUTPUTS, ROWS_FIRST, EVEN,
        )  # fmt: skip
    return tl.trans(total) if ROWS_FIRST else total


@triton.jit
def summed_numbers(
    values, is_row, numbers, output, inputs, first, last, total, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr
):
    column = tl.arange(0, STEP)
    places = numbers + output.to(tl.int64) * inputs
    for step in range(first, last):
        is_input = (column + step * STEP < inputs)[None, :]
        place = places[:, None] + (column + step * STEP)[None, :]
        tile = tl.load(place) if EVEN else tl.load(place, mask=is_input, other=0.0)
        value = rows_at(values, is_row, column + step * STEP, inputs, ROWS_FIRST, EVEN)
        total = multiplied(value, tile, total, True, ROWS_FIRST)
    return total


@triton.jit
def summed_lines(
    values, factors, is_row, codes, scales, output, inputs, first, last, total,
    BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of products of codes. Those of a tile of inputs are one product of tensor cores."""
    column = tl.arange(0, STEP)
    lines = codes + output.to(tl.int64) * (tl.cdiv(inputs, STEP) * STEP)
    owned, stride = scales_of(output, inputs, "e4m3", BLOCK_ROWS, RUNS)
    for step in range(first, last):
        tile = tl.load(lines[:, None] + (column + step * STEP)[None, :])
        value = rows_at(values, is_row, column + step * STEP, inputs, False, True)
        if PORTABLE:
            tile, value = tile.to(tl.float32), value.to(tl.float32)
        factor = tl.load(factors + step, mask=is_row, other=0.0)
        part = tl.dot(tile, value, input_precision="ieee")
        if RUNS > 0:
            part *= tl.load(scales + owned + step * stride)[:, None]
        total += part * factor[None, :]
    if RUNS == 0:
        total *= tl.load(scales + output)[:, None]
    return total


@triton.jit
def summed_codes(
    values, is_row, codes, scales, more, output, inputs, first, last, total,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr, FOLD: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = STEP // (2 * PAIRS)
    INTEGER: tl.constexpr = FORMAT == "int4" or FORMAT == "int8"
    # Scales multiply sums, not codes, and those of a step are read a step ahead: no copy unit prefetches what does not
    # reach a tensor core.
    OF_SUMS: tl.constexpr = INTEGER or FORMAT == "fp8"
    LATER: tl.constexpr = OF_SUMS and RUNS > 0 and not FOLD
    AHEAD: tl.constexpr = OF_SUMS and RUNS == 1
    PARTS: tl.constexpr = RUNS if INTEGER else 1
    word, column = tl.arange(0, WORDS), tl.arange(0, 2 * WORDS)
    places = words_of(codes, output, 0, inputs, WORDS)
    owned, stride = scales_of(output, inputs, FORMAT, BLOCK_ROWS, RUNS)
    factor = factor_of(scales, more, output, FORMAT, RUNS)
    ahead = scale_at(scales, owned + first * stride) if AHEAD else factor
    for step in range(first, last):
        words = tl.load(places[:, None] + (word + step * (TILE * WORDS))[None, :], eviction_policy="evict_first")
        scale = ahead
        if AHEAD:
            ahead = scale_at(scales, owned + tl.minimum(step + 1, last - 1) * stride)
        for run in tl.static_range(PARTS):
            place = owned + step * stride + run * TILE
            if RUNS > 0 and not AHEAD:
                scale = scale_at(scales, place)
            zero = zero_at(scales, more, place, FORMAT)
            part = tl.zeros_like(total) if LATER else total
            for pair in tl.static_range(run * PAIRS // PARTS, (run + 1) * PAIRS // PARTS):
                tile = numbers_of(words, scale, zero, factor, pair, FORMAT, PAIRS, FOLD, OUTPUTS)
                value = rows_at(values, is_row, column + (step * STEP + pair * 2 * WORDS), inputs, ROWS_FIRST, EVEN)
                part = multiplied(value, tile, part, FOLD, ROWS_FIRST)
            if LATER:
                total += part * (scale[None, :] if ROWS_FIRST else scale[:, None])
            else:
                total = part
    if not FOLD:
        if not INTEGER:
            total = total * (EIGHT_BITS_UNIT if PAIRS == 2 else FOUR_BITS_UNIT)
        if FORMAT == "nvfp4" or RUNS == 0:
            total = total * (factor[None, :] if ROWS_FIRST else factor[:, None])
    return total


@triton.jit
def words_of(codes, output, step, inputs, WORDS: tl.constexpr):
    """Return where the words of lines begin, in the tile of a step."""
    tile = (output // TILE).to(tl.int64) * tl.cdiv(inputs, STEP) + step
    return codes + (tile * TILE + output % TILE) * WORDS


@triton.jit
def scales_of(output, inputs, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr):
    """Return where the scales of lines are in the first step, and how far apart those of two steps are."""
    steps = tl.cdiv(inputs, STEP)
    if BLOCK_ROWS > 0:
        place, stride = output // BLOCK_ROWS * steps, 1
    elif RUNS > 0:
        place, stride = (output // TILE) * steps * (RUNS * TILE) + output % TILE, RUNS * TILE
    else:
        place, stride = output, 0
    return place, stride


@triton.jit
def scale_at(scales, place):
    """Return scales: float32, or words of bytes."""
    found = tl.load(scales + place)
    return found if found.dtype == tl.int32 else found.to(tl.float32)


@triton.jit
def zero_at(scales, more, place, FORMAT: tl.constexpr):
    """Return the zeros of integers, or of NVFP4 the second word of scales."""
    if FORMAT == "nvfp4":
        found = tl.load(scales + place + TILE)
    elif more is not None:
        found = tl.load(more + place).to(tl.int32)
    else:
        found = place * 0 + (8 if FORMAT == "int4" else 128)
    return found


@triton.jit
def factor_of(scales, more, output, FORMAT: tl.constexpr, RUNS: tl.constexpr):
    """Return what multiplies all of a line, of formats that have such factors."""
    if FORMAT == "nvfp4":
        found = tl.load(more + output)
    elif RUNS == 0:
        found = tl.load(scales + output)
    else:
        found = tl.full(output.shape, 1.0, tl.float32)
    return found


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
def numbers_of(
    words, scale, zero, factor,
    PAIR: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr, FOLD: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return a pair of codes of each word, side by side: with `FOLD` the weights, otherwise what is multiplied."""
    if FORMAT == "fp8":
        low, high = halves_of(words, words, PAIR, FORMAT, FP8_ASSEMBLY)
    elif FORMAT == "mxfp8":
        low, high = halves_of(words, power_of(words, scale, zero, PAIR, FORMAT), PAIR, FORMAT, MXFP8_ASSEMBLY)
    elif FORMAT == "int4":
        low, high = halves_of(words, tl.broadcast_to(zero[:, None], words.shape), PAIR, FORMAT, INT4_ASSEMBLY)
    elif FORMAT == "int8":
        low, high = halves_of(words, words, PAIR, FORMAT, INT8_ASSEMBLY)
    else:
        low, high = halves_of(words, power_of(words, scale, zero, PAIR, FORMAT), PAIR, FORMAT, FP4_ASSEMBLY)
    tile = tl.reshape(tl.join(low, high), (OUTPUTS, STEP // PAIRS))
    if FOLD:
        tile = tile.to(tl.float32)
        if FORMAT == "int4" or FORMAT == "int8":
            tile *= scale[:, None]
        elif FORMAT == "fp8":
            tile *= (scale * EIGHT_BITS_UNIT)[:, None]
        elif FORMAT == "nvfp4":
            tile *= (factor * FOUR_BITS_UNIT)[:, None]
        else:
            tile *= EIGHT_BITS_UNIT if PAIRS == 2 else FOUR_BITS_UNIT
    return tile


@triton.jit
def power_of(words, scale, zero, PAIR: tl.constexpr, FORMAT: tl.constexpr):
    """Return the scale of a pair of codes of each word: the bits of a bfloat16."""
    WORDS: tl.constexpr = words.shape[1]
    is_late = (tl.arange(0, WORDS) >= WORDS // 2)[None, :]
    if FORMAT == "mxfp4":
        bits = tl.broadcast_to((((scale >> (PAIR * 8)) & 255) << 7)[:, None], words.shape)
    elif FORMAT == "mxfp8":
        early, late = (scale >> (PAIR * 16)) & 255, (scale >> (PAIR * 16 + 8)) & 255
        bits = tl.where(is_late, late[:, None], early[:, None]) << 7
    else:
        tl.static_assert(FORMAT == "nvfp4")
        own = tl.where(is_late, zero[:, None], scale[:, None])
        bits = (((own >> (PAIR * 8)) & 255) << 4) + SMALL
    return bits


@triton.jit
def halves_of(words, other, PAIR: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return both codes of a pair of each word as numbers. `other`: the bits of their scales, or their zeros."""
    if PORTABLE:
        low, high = assembled(words, 2 * PAIR, FORMAT), assembled(words, 2 * PAIR + 1, FORMAT)
        if FORMAT == "int4":
            low, high = low - other.to(tl.float32), high - other.to(tl.float32)
        elif FORMAT == "int8":
            low, high = low - 128.0, high - 128.0
        elif FORMAT != "fp8":
            power = (other << 16).to(tl.float32, bitcast=True)
            low, high = low * power, high * power
    else:
        if FORMAT == "int4":
            other = CENTER + other * 0x10001
        elif FORMAT != "fp8" and FORMAT != "int8":
            other = other * 0x10001
        text: tl.constexpr = ASSEMBLY[PAIR]
        if FORMAT == "fp8" or FORMAT == "int8":
            both = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        else:
            both = tl.inline_asm_elementwise(text, "=r,r,r", [words, other], dtype=tl.int32, is_pure=True, pack=1)
        low = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def assembled(words, CODE: tl.constexpr, FORMAT: tl.constexpr):
    """Return one code of each word in float32: an integer, or a float's bits moved. For the interpreter."""
    if FORMAT == "int4":
        found = ((words >> (CODE % 2 * 16 + CODE // 2 * 4)) & 15).to(tl.float32)
    elif FORMAT == "int8":
        found = ((words >> (CODE % 2 * 16 + CODE // 2 * 8)) & 255).to(tl.float32)
    else:
        bits = words * 0
        is_long: tl.constexpr = FORMAT == "fp8" or FORMAT == "mxfp8"
        for there, mask, target in (E4M3_RUNS.value if is_long else E2M1_RUNS.value)[CODE]:
            bits |= ((words >> there) & mask) << (16 + target)
        found = bits.to(tl.float32, bitcast=True)
    return found
