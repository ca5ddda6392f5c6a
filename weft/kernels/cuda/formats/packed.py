"""Layouts that the kernels of a GPU read: codes in tiles, their bits placed so that few instructions make bfloat16.

A tile has 16 outputs and 128 inputs and is contiguous; the tiles of 16 outputs follow each other. A matrix is padded to
whole tiles with zeros. A line of a tile is 32 words of two pairs of codes (FP8), or 16 words of four (MXFP4): the first
pairs of all words are the first inputs, the second pairs the inputs after these. `PLACES` says where each bit of a code
lies in its half of a word: a few shifts and masks move both codes of a pair to where bfloat16 has its sign, the low
bits of its exponent and the high bits of its mantissa (`codes.py`). What results is the number times a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.mxfp4 import BLOCK, Mxfp4
from weft.kernels.formats.stored import Layout, Stored

LINES, STEP = 16, 128
# Codes that are packed at a time.
AT_ONCE = 1 << 24
# Where the bits of a code go: runs of bits, (the first here, the first there, their number), counted from the lowest.
Runs = tuple[tuple[int, int, int], ...]
FP8_PLACES: tuple[Runs, ...] = tuple(
    tuple((here, there + 16 * half, count) for here, there, count in runs)
    for runs in (((7, 15, 1), (0, 4, 7)), ((7, 11, 1), (4, 12, 3), (0, 0, 4)))
    for half in (0, 1)
)
MXFP4_PLACES: tuple[Runs, ...] = tuple(
    tuple((here, there + 16 * half, count) for here, there, count in runs)
    for runs in (
        ((3, 15, 1), (0, 6, 3)), ((3, 12, 1), (0, 3, 3)), ((3, 9, 1), (0, 0, 3)), ((3, 14, 1), (1, 10, 2), (0, 13, 1)),
    )
    for half in (0, 1)
)  # fmt: skip
# Codes as bfloat16 are numbers times 2**-120 and 2**-126. Factors restore that in two steps that stay in float32.
FP8_FACTOR, MXFP4_FACTOR = 60, 64
# A power of two is stored as the exponent of its bfloat16, MXFP4_FACTOR below the one that would restore the number.
EXPONENT_SHIFT, MOST_EXPONENT = 62, 192


@dataclass(frozen=True, slots=True)
class CodeTiles(Layout):
    """FP8 or MXFP4 in tiles. Tensors: codes [tiles of outputs, tiles of inputs, 16, words of 128 codes], and scales.

    FP8 has scales [blocks of outputs, tiles of inputs], times 2**60, of `block_rows` outputs; or, without
    `block_rows`, [outputs]. MXFP4 has words of four exponents, [tiles of outputs, tiles of inputs, 16].
    """

    block_rows: int | None = None

    @property
    def is_fp8(self) -> bool:
        return self.name == FP8

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        codes, scales = stored.tensors
        found = unplaced(codes, FP8_PLACES if self.is_fp8 else MXFP4_PLACES)
        if self.is_fp8:
            values = found.to(torch.uint8).view(torch.float8_e4m3fn).float()[..., : stored.outputs, : stored.inputs]
            if self.block_rows is None:
                return values * (scales[..., : stored.outputs] * 2.0**-FP8_FACTOR).unsqueeze(-1)
            own = scales.repeat_interleave(self.block_rows, -2)[..., : stored.outputs, :] * 2.0**-FP8_FACTOR
            return values * own.repeat_interleave(STEP, -1)[..., : stored.inputs]
        own = scales.contiguous().unsqueeze(-1).view(torch.uint8).transpose(-3, -2).flatten(-2).flatten(-3, -2)
        plain = Stored(Mxfp4(), (found[..., 0::2] | found[..., 1::2] << 4, own - EXPONENT_SHIFT), *found.shape[-2:])
        return plain.decode()[..., : stored.outputs, : stored.inputs]

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        if start % LINES or (self.block_rows is not None and start % self.block_rows):
            return None
        codes, scales = stored.tensors
        last = -(-end // LINES)
        if not self.is_fp8:
            own = scales[..., start // LINES : last, :, :]
        elif self.block_rows is None:
            own = scales[..., start : last * LINES]
        else:
            own = scales[..., start // self.block_rows : -(-end // self.block_rows), :]
        tensors = (codes[..., start // LINES : last, :, :, :], own)
        return Stored(self, tensors, end - start, stored.inputs)


FP8, MXFP4 = "fp8 in tiles 2", "mxfp4 in tiles 2"


def pack(stored: Stored) -> Stored:
    """Return a matrix in the layout that kernels read fastest, or as it is."""
    found = None
    if isinstance(stored.format, Fp8):
        found = packed_fp8(stored, stored.format)
    elif isinstance(stored.format, Mxfp4):
        found = packed_mxfp4(stored)
    return stored if found is None else found


def packed_fp8(stored: Stored, form: Fp8) -> Stored | None:
    codes, scales = stored.tensors
    whole = form.block_columns >= stored.inputs
    if not whole and form.block_columns % STEP:
        return None
    scales = scales * 2.0**FP8_FACTOR
    # Factors of other sizes would leave float32 on the way.
    if not bool((scales.isfinite() & (scales.abs() < 2.0**67)).all()):
        return None
    if whole and (form.block_rows == 1 or stored.inputs > 2 * STEP):
        padded = -(-stored.outputs // LINES) * LINES
        own = scales.squeeze(-1).repeat_interleave(form.block_rows, -1)[..., : stored.outputs]
        own = torch.nn.functional.pad(own, (0, padded - stored.outputs))
        layout = CodeTiles(FP8)
    else:
        steps = -(-stored.inputs // STEP)
        own = scales.repeat_interleave(max(1, -(-form.block_columns // STEP)), -1)[..., :steps]
        layout = CodeTiles(FP8, form.block_rows)
    bytes_of = placed(codes.view(torch.uint8), lambda part: part, FP8_PLACES)
    return Stored(layout, (bytes_of, own.contiguous()), stored.outputs, stored.inputs)


def packed_mxfp4(stored: Stored) -> Stored | None:
    codes, scales = stored.tensors
    if int(scales.max()) > MOST_EXPONENT:
        return None
    exponents = in_tiles(scales + EXPONENT_SHIFT, STEP // BLOCK).view(torch.int32).squeeze(-1)

    def numbers(part: Tensor) -> Tensor:
        found: Tensor = torch.stack((part & 15, part >> 4), -1).flatten(-2)
        return found

    return Stored(CodeTiles(MXFP4), (placed(codes, numbers, MXFP4_PLACES), exponents), stored.outputs, stored.inputs)


def in_tiles(matrix: Tensor, width: int) -> Tensor:
    """Return a matrix, or those of experts, in tiles of 16 lines and `width` columns, padded with zeros."""
    *_, lines, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % width, 0, -lines % LINES))
    found: Tensor = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, LINES)).transpose(-3, -2).contiguous()
    return found


def placed(codes: Tensor, numbers: Callable[[Tensor], Tensor], places: Sequence[Runs]) -> Int[Tensor, "*tiles words"]:
    """Return codes in tiles, with their bits where `places` wants them. A few lines are packed at a time."""
    *experts, lines, _ = codes.shape
    columns = numbers(codes[..., :1, :]).shape[-1]
    many = codes.reshape(-1, lines, codes.shape[-1])
    groups, steps, size = -(-lines // LINES), -(-columns // STEP), STEP // len(places)
    out = torch.empty(len(many), groups, steps, LINES, size, dtype=torch.int32, device=codes.device)
    at_once = max(1, AT_ONCE // (LINES * columns))
    for number in range(len(many)):
        for first in range(0, groups, at_once):
            tiles = in_tiles(numbers(many[number, first * LINES : (first + at_once) * LINES]), STEP)
            out[number, first : first + at_once] = words_of(tiles, places)
    return out.view(*experts, groups, steps, LINES, size)


def words_of(tiles: Int[Tensor, "*tiles 128"], places: Sequence[Runs]) -> Int[Tensor, "*tiles words"]:
    """Return the words of codes."""
    # A word has two codes of each of these parts of its line.
    codes = tiles.int().unflatten(-1, (len(places) // 2, -1, 2))
    words = torch.zeros_like(codes[..., 0, :, 0])
    for number, runs in enumerate(places):
        for here, there, count in runs:
            words |= ((codes[..., number // 2, :, number % 2] >> here) & ((1 << count) - 1)) << there
    return words


def unplaced(words: Int[Tensor, "*tiles words"], places: Sequence[Runs]) -> Int[Tensor, "*experts outputs inputs"]:
    """Return the codes of whole tiles, as integers, line by line."""
    found = []
    for runs in places:
        parts = [((words >> there) & ((1 << count) - 1)) << here for here, there, count in runs]
        found.append(sum(parts[1:], parts[0]))
    # Tiles of outputs, tiles of inputs, lines, columns.
    columns = torch.stack(found, -1).unflatten(-1, (-1, 2)).transpose(-3, -2).flatten(-3)
    lines: Tensor = columns.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return lines
