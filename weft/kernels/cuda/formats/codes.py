"""Sums of products with packed weights, for kernels of any operation: few instructions make bfloat16 of their codes.

Tensor cores multiply codes as they are, as numbers times a power of two; scales of FP8 multiply the sum of 128 inputs
in float32. Powers of two of MXFP4 multiply the codes, which stay exact. With `FOLD` weights are first decoded and
rounded to the dtype of the inputs, and a sum is one chain over the inputs, whatever the tile: exact mode and dtypes
other than bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from weft.kernels.cuda.formats.packed import FP8_PLACES, LINES, MXFP4_PLACES, CodeTiles
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.formats.stored import DENSE, Stored

# Triton's interpreter runs no assembly, and is wrong in bfloat16: it decodes in float32.
PORTABLE = tl.constexpr(bool(knobs.runtime.interpret))
TILE, STEP = tl.constexpr(LINES), tl.constexpr(TILE_INPUTS)
# Two bfloat16 in each result: codes 0 and 1, then 2 and 3. `packed.py` says where their bits are.
FP8_TO_BFLOAT16 = """{
    .reg .b32 t, u;
    and.b32 $0, $2, 0x87f087f0;
    shr.b32 t, $2, 4;
    and.b32 t, t, 0x07000700;
    shl.b32 u, $2, 4;
    and.b32 u, u, 0x80f080f0;
    or.b32 $1, t, u;
}"""
MXFP4_TO_BFLOAT16 = """{
    .reg .b32 t, u, v;
    and.b32 $0, $4, 0x81c081c0;
    shl.b32 t, $4, 3;
    and.b32 $1, t, 0x81c081c0;
    shl.b32 t, $4, 6;
    and.b32 $2, t, 0x81c081c0;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x80008000;
    shr.b32 u, $4, 3;
    and.b32 u, u, 0x01800180;
    shr.b32 v, $4, 7;
    and.b32 v, v, 0x00400040;
    or.b32 t, t, u;
    or.b32 $3, t, v;
}"""
FP8_ASSEMBLY, MXFP4_ASSEMBLY = tl.constexpr(FP8_TO_BFLOAT16), tl.constexpr(MXFP4_TO_BFLOAT16)


# The sign of a code is its highest bit; those below it end at bits 4 and 6 of a bfloat16.
FP8_RUNS = tl.constexpr(
    tuple(tuple((there, (1 << n) - 1, 15 if here == 7 else here + 4) for here, there, n in runs) for runs in FP8_PLACES)
)
MXFP4_RUNS = tl.constexpr(
    tuple(
        tuple((there, (1 << n) - 1, 15 if here == 3 else here + 6) for here, there, n in runs) for runs in MXFP4_PLACES
    )
)


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
        codes += number * lines * steps * STEP
        scales += number * tl.cdiv(outputs, BLOCK_ROWS) * steps if BLOCK_ROWS > 0 else number * lines
    elif FORMAT == "mxfp4":
        codes += number * lines * steps * (STEP // 2)
        scales += number * lines * steps * 4
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
    steps = tl.cdiv(inputs, STEP)
    group, line = (output // TILE).to(tl.int64) * steps, output % TILE
    total = tl.zeros((ROWS, OUTPUTS) if ROWS_FIRST else (OUTPUTS, ROWS), tl.float32)
    if FORMAT == "fp8":
        byte = tl.arange(0, STEP)
        places = codes + group * (TILE * STEP) + line * STEP
        if BLOCK_ROWS > 0:
            blocks = scales + (output // BLOCK_ROWS) * steps
            # Read a step ahead: no copy unit prefetches it.
            scale = tl.load(blocks + first)
        else:
            scale = tl.load(scales + output)
        for step in range(first, last):
            tile = fp8_tile(places[:, None] + (byte + step * (TILE * STEP))[None, :], byte)
            used = scale
            if BLOCK_ROWS > 0:
                scale = tl.load(blocks + tl.minimum(step + 1, last - 1))
            value = rows_at(values, is_row, byte + step * STEP, inputs, ROWS_FIRST, EVEN)
            if FOLD:
                tile = tile.to(tl.float32) * used[:, None] * 1152921504606846976.0
            if FOLD or BLOCK_ROWS == 0:
                total = multiplied(value, tile, total, FOLD, ROWS_FIRST)
            else:
                part = multiplied(value, tile, tl.zeros_like(total), FOLD, ROWS_FIRST)
                total += part * (used[None, :] if ROWS_FIRST else used[:, None])
    elif FORMAT == "mxfp4":
        byte, block = tl.arange(0, STEP // 2), tl.arange(0, 4)
        places = codes + group * (TILE * STEP // 2) + line * (STEP // 2)
        blocks = scales + group * (TILE * 4) + line * 4
        for step in range(first, last):
            low, high = mxfp4_tiles(places[:, None] + (byte + step * (TILE * STEP // 2))[None, :], byte)
            one, other = powers(tl.load(blocks[:, None] + (block + step * (TILE * 4))[None, :]), OUTPUTS)
            low, high = low * one, high * other
            if FOLD:
                low, high = low.to(tl.float32) * 18446744073709551616.0, high.to(tl.float32) * 18446744073709551616.0
            value = rows_at(values, is_row, byte + step * STEP, inputs, ROWS_FIRST, EVEN)
            total = multiplied(value, low, total, FOLD, ROWS_FIRST)
            value = rows_at(values, is_row, byte + (step * STEP + STEP // 2), inputs, ROWS_FIRST, EVEN)
            total = multiplied(value, high, total, FOLD, ROWS_FIRST)
    else:
        tl.static_assert(FORMAT == "dense")
        column = tl.arange(0, STEP)
        places = codes + output.to(tl.int64) * inputs
        for step in range(first, last):
            is_input = (column + step * STEP < inputs)[None, :]
            place = places[:, None] + (column + step * STEP)[None, :]
            tile = tl.load(place) if EVEN else tl.load(place, mask=is_input, other=0.0)
            value = rows_at(values, is_row, column + step * STEP, inputs, ROWS_FIRST, EVEN)
            total = multiplied(value, tile, total, True, ROWS_FIRST)
    if ROWS_FIRST:
        total = tl.trans(total)
    if FORMAT == "fp8" and not FOLD:
        total = total * 1152921504606846976.0
        if BLOCK_ROWS == 0:
            total = total * scale[:, None]
    if FORMAT == "mxfp4" and not FOLD:
        total = total * 18446744073709551616.0
    return total


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
def fp8_tile(place, byte):
    """Return codes [outputs, inputs] as numbers times 2**-120."""
    if PORTABLE:
        tile = assembled(words_at(place, byte), byte % 4, 0, "fp8")
    else:
        code = tl.load(place, eviction_policy="evict_first")
        tile = tl.inline_asm_elementwise(FP8_ASSEMBLY, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tile


@triton.jit
def mxfp4_tiles(place, byte):
    """Return both halves of the inputs of a tile, as numbers times 2**-126."""
    if PORTABLE:
        words = words_at(place, byte)
        low, high = assembled(words, byte % 4, 0, "mxfp4"), assembled(words, byte % 4, 4, "mxfp4")
    else:
        code = tl.load(place, eviction_policy="evict_first")
        low, high = tl.inline_asm_elementwise(
            MXFP4_ASSEMBLY, "=r,=r,=r,=r,r", [code], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def powers(exponents, OUTPUTS: tl.constexpr):
    """Return the powers of two of both halves of a tile, for each code."""
    if PORTABLE:
        scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = (exponents.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    one, other = tl.split(tl.permute(tl.reshape(scale, (OUTPUTS, 2, 2)), (0, 2, 1)))
    one = tl.reshape(tl.broadcast_to(one[:, :, None], (OUTPUTS, 2, STEP // 4)), (OUTPUTS, STEP // 2))
    return one, tl.reshape(tl.broadcast_to(other[:, :, None], (OUTPUTS, 2, STEP // 4)), (OUTPUTS, STEP // 2))


@triton.jit
def words_at(place, byte):
    """Return the 32 bits to which each byte belongs. For the interpreter."""
    return tl.load((place - (byte % 4)[None, :]).to(tl.pointer_type(tl.int32)))


@triton.jit
def assembled(words, number, FIRST: tl.constexpr, FORMAT: tl.constexpr):
    """Return float32 with the bits of code FIRST + `number` of words. For the interpreter."""
    runs = FP8_RUNS.value if FORMAT == "fp8" else MXFP4_RUNS.value
    bits = words * 0
    for code in range(4):
        for there, mask, target in runs[FIRST + code]:
            bits = tl.where((number == code)[None, :], bits | ((words >> there) & mask) << (16 + target), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weights_of(codes, scales, output, step, inputs, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return a tile of 16 outputs as float32, in two halves if it is MXFP4."""
    steps = tl.cdiv(inputs, STEP)
    group, line = (output // TILE).to(tl.int64) * steps + step, output % TILE
    if FORMAT == "fp8":
        byte = tl.arange(0, STEP)
        low = fp8_tile(codes + (group * (TILE * STEP) + line * STEP)[:, None] + byte[None, :], byte)
        scale = tl.load(scales + ((output // BLOCK_ROWS) * steps + step if BLOCK_ROWS > 0 else output))
        low = low.to(tl.float32) * scale[:, None] * 1152921504606846976.0
        high = low
    else:
        byte, block = tl.arange(0, STEP // 2), tl.arange(0, 4)
        places = codes + group * (TILE * STEP // 2) + line * (STEP // 2)
        low, high = mxfp4_tiles(places[:, None] + byte[None, :], byte)
        one, other = powers(tl.load(scales + (group * (TILE * 4) + line * 4)[:, None] + block[None, :]), TILE)
        low, high = (low * one).to(tl.float32), (high * other).to(tl.float32)
        low, high = low * 18446744073709551616.0, high * 18446744073709551616.0
    return low, high
