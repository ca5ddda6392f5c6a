"""Loader of tiles of GGUF's blocks. `weft/kernels/formats/block_types.py` says what their bytes mean.

A tile has 32 inputs, which lie in one block of every output. Every number is made of its own bytes: neighbours read
the same ones, out of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from weft.kernels.formats.block_types import BLOCK_TYPES, DOUBLED, UNEVEN
from weft.kernels.formats.blocks import BlockFormat

# Inputs of a tile, and the smallest block.
BLOCK_STEP = 32
KINDS = {form: kind.lower() for kind, form in BLOCK_TYPES.items()}


def block_kind(form: BlockFormat) -> str:
    """Return what kernels call a type of blocks.

    >>> from weft.kernels.formats.block_types import MXFP4, Q4_K
    >>> block_kind(Q4_K), block_kind(MXFP4)
    ('q4_k blocks', 'mxfp4 blocks')
    """
    return f"{KINDS[form]} blocks"


def in_words(values: Sequence[int]) -> tuple[int, ...]:
    """Return sixteen values as four words of four bytes.

    >>> in_words(range(16))[0] == 0x03020100, in_words((-1,) * 16)[3]
    (True, -1)
    """
    packed = bytes(value & 255 for value in values)
    return tuple(int.from_bytes(packed[place : place + 4], "little", signed=True) for place in range(0, 16, 4))


UNEVEN_WORDS, DOUBLED_WORDS = tl.constexpr(in_words(UNEVEN)), tl.constexpr(in_words(DOUBLED))


@triton.jit
def block_tile(
    codes, expert, output, column, outputs, inputs, KIND: tl.constexpr, BYTES: tl.constexpr, NUMBERS: tl.constexpr
):
    """Return a tile of the numbers themselves, and ones."""
    line = (expert * outputs + tl.minimum(output, outputs - 1)).to(tl.int64)
    # Where the block of every output begins, and each number's place in its block, in its 128, in its 32 and in its 16.
    start = codes + (line * (inputs // NUMBERS) + tl.min(column, 0) // NUMBERS) * BYTES
    at, n = start[:, None], (column % NUMBERS)[None, :]
    part, own, run = n // 128, n % 32, n // 32
    if KIND == "q8_0 blocks":
        tile = half(at) * signed(at + 2 + n)
    elif KIND == "q4_0 blocks":
        tile = half(at) * (nibble(at + 2 + n % 16, n // 16) - 8).to(tl.float32)
    elif KIND == "q4_1 blocks":
        tile = half(at) * nibble(at + 4 + n % 16, n // 16).to(tl.float32) + half(at + 2)
    elif KIND == "q5_0 blocks":
        code = nibble(at + 6 + n % 16, n // 16) | (bits(at + 2 + n // 8, n % 8, 1) << 4)
        tile = half(at) * (code - 16).to(tl.float32)
    elif KIND == "q5_1 blocks":
        code = nibble(at + 8 + n % 16, n // 16) | (bits(at + 4 + n // 8, n % 8, 1) << 4)
        tile = half(at) * code.to(tl.float32) + half(at + 2)
    elif KIND == "iq4_nl blocks":
        tile = half(at) * looked_up(nibble(at + 2 + n % 16, n // 16), UNEVEN_WORDS)
    elif KIND == "mxfp4 blocks":
        exponent = tl.load(at).to(tl.int32)
        # Half of the power of two; the least two have no exponent of their own.
        power = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).to(tl.float32, bitcast=True)
        tile = power * looked_up(nibble(at + 1 + n % 16, n // 16), DOUBLED_WORDS)
    elif KIND == "nvfp4 blocks":
        tile = small_float(at + n // 16) * looked_up(nibble(at + 4 + n // 16 * 8 + n % 8, n // 8 % 2), DOUBLED_WORDS)
    elif KIND == "q2_k blocks":
        scales = tl.load(at + n // 16).to(tl.int32)
        code = bits(at + 16 + part * 32 + own, run % 4 * 2, 3)
        tile = half(at + 80) * (scales & 15).to(tl.float32) * code.to(tl.float32)
        tile -= half(at + 82) * (scales >> 4).to(tl.float32)
    elif KIND == "q3_k blocks":
        of_run = n // 16
        scale = nibble(at + 96 + of_run % 8, of_run // 8) | (bits(at + 104 + of_run % 4, of_run // 4 * 2, 3) << 4)
        code = bits(at + 32 + part * 32 + own, run % 4 * 2, 3) | (bits(at + own, run, 1) << 2)
        tile = half(at + 108) * (scale - 32).to(tl.float32) * (code - 4).to(tl.float32)
    elif KIND == "q4_k blocks":
        scale, least = six_bits(at, run)
        code = nibble(at + 16 + run // 2 * 32 + own, run % 2)
        tile = half(at) * scale * code.to(tl.float32) - half(at + 2) * least
    elif KIND == "q5_k blocks":
        scale, least = six_bits(at, run)
        code = nibble(at + 48 + run // 2 * 32 + own, run % 2) | (bits(at + 16 + own, run, 1) << 4)
        tile = half(at) * scale * code.to(tl.float32) - half(at + 2) * least
    elif KIND == "q6_k blocks":
        low, high = nibble(at + part * 64 + n % 64, n // 64 % 2), bits(at + 128 + part * 32 + own, run % 4 * 2, 3)
        tile = half(at + 208) * signed(at + 192 + n // 16) * ((low | (high << 4)) - 32).to(tl.float32)
    else:
        tl.static_assert(KIND == "iq4_xs blocks")
        scale = nibble(at + 4 + run // 2, run % 2) | (bits(at + 2 + run // 4, run % 4 * 2, 3) << 4)
        code = nibble(at + 8 + run * 16 + n % 16, n // 16 % 2)
        tile = half(at) * (scale - 32).to(tl.float32) * looked_up(code, UNEVEN_WORDS)
    tile = tl.where((output < outputs)[:, None] & (column < inputs)[None, :], tile, 0.0)
    return tile, tl.full(output.shape, 1.0, tl.float32)


@triton.jit
def half(at):
    """Return 16-bit floats, which need not be aligned."""
    found = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
    return found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed(at):
    return tl.load(at).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def bits(at, shift, MASK: tl.constexpr):
    return (tl.load(at).to(tl.int32) >> shift) & MASK


@triton.jit
def nibble(at, is_high):
    return bits(at, is_high * 4, 15)


@triton.jit
def small_float(at):
    """Return halves of unsigned e4m3; the code without a number counts as zero."""
    code = tl.load(at).to(tl.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(tl.float32)
    power = ((exponent + 116) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, mantissa * 0.0009765625, (8.0 + mantissa) * power)
    return tl.where(code == 0x7F, 0.0, scale)


@triton.jit
def six_bits(at, run):
    """Return the scale and the minimum of one of eight runs."""
    low, middle = tl.load(at + 4 + run % 4).to(tl.int32), tl.load(at + 8 + run % 4).to(tl.int32)
    high = tl.load(at + 12 + run % 4).to(tl.int32)
    scale = tl.where(run < 4, low & 63, (high & 15) | (low >> 6 << 4))
    least = tl.where(run < 4, middle & 63, (high >> 4) | (middle >> 6 << 4))
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def looked_up(code, WORDS: tl.constexpr):
    """Return the value of a code of four bits, of sixteen bytes with a sign."""
    word = tl.where(code < 8, tl.where(code < 4, WORDS[0], WORDS[1]), tl.where(code < 12, WORDS[2], WORDS[3]))
    # The byte moves to the top, whose sign the way down keeps.
    return (word << (24 - code % 4 * 8) >> 24).to(tl.float32)
