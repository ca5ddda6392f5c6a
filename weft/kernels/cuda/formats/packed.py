"""Layouts that the kernels of a GPU read: codes in tiles, their bits placed so that few instructions make bfloat16.

A tile has 16 outputs and 128 inputs and is contiguous; the tiles of 16 outputs follow each other. A matrix is padded to
whole tiles with zeros. A line of a tile is 32 words of two pairs of codes (eight bits), or 16 words of four (four
bits): the first pairs of all words are the first inputs, the second pairs the inputs after these. `PLACES` says where
each bit of a code lies in its half of a word. A few shifts and masks (`codes.py`) move both floats of a pair to where
bfloat16 has its sign, the low bits of its exponent and the high bits of its mantissa: what results is the number times
a power of two. Integers become the low bits of a mantissa.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.formats.fp8 import CODES as E4M3
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped, halves, paired
from weft.kernels.formats.mxfp4 import BLOCK, EXPONENT_BIAS, Mxfp4
from weft.kernels.formats.nvfp4 import BLOCK as SHORT_BLOCK
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import Layout, Stored

LINES, STEP = 16, 128
# Codes that are packed at a time.
AT_ONCE = 1 << 24
# Where the bits of a code go: runs of bits, (the first here, the first there, their number), counted from the lowest.
Runs = tuple[tuple[int, int, int], ...]


def _in_both_halves(*pairs: Runs) -> tuple[Runs, ...]:
    """Return the places of codes in a word, from those of its lower half: both codes of a pair lie alike."""
    return tuple(
        tuple((here, there + 16 * half, count) for here, there, count in runs) for runs in pairs for half in (0, 1)
    )


E4M3_PLACES = _in_both_halves(((7, 15, 1), (0, 4, 7)), ((7, 11, 1), (4, 12, 3), (0, 0, 4)))
E2M1_PLACES = _in_both_halves(
    ((3, 15, 1), (0, 6, 3)), ((3, 12, 1), (0, 3, 3)), ((3, 9, 1), (0, 0, 3)), ((3, 14, 1), (1, 10, 2), (0, 13, 1))
)
PLACES = {
    "fp8": E4M3_PLACES,
    "mxfp8": E4M3_PLACES,
    "mxfp4": E2M1_PLACES,
    "nvfp4": E2M1_PLACES,
    "int4": _in_both_halves(((0, 0, 4),), ((0, 4, 4),), ((0, 8, 4),), ((0, 12, 4),)),
    "int8": _in_both_halves(((0, 0, 8),), ((0, 8, 8),)),
}
# Codes as bfloat16 are numbers times 2**-120 (e4m3) and 2**-126 (e2m1). A scale restores part of that, and a factor of
# two to this power the rest, so that nothing leaves float32.
FACTORS = {"fp8": 60, "mxfp8": 60, "mxfp4": 64, "nvfp4": 64}
# A power of two is stored as the exponent of a bfloat16: that of its format plus this.
EXPONENT_SHIFTS, MOST_EXPONENT = {"mxfp8": 60, "mxfp4": 62}, 254
# A scale of NVFP4 is stored as a float of five bits of exponent, biased by 9, and three of mantissa: it is never less
# than 1, and as bfloat16, with its bits raised by this, it is the scale times 2**62.
SMALL_BIAS = 9
SMALL_OFFSET = (127 + 62 - SMALL_BIAS) << 7
# Larger bytes of scales are negative numbers or none.
MOST_SCALE = 126
# A change of what stored bytes mean raises the number.
VERSIONS = {"fp8": 2, "mxfp8": 1, "mxfp4": 2, "nvfp4": 1, "int4": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class CodeTiles(Layout):
    """Codes in tiles. Tensors: codes [tiles of outputs, tiles of inputs, 16, words of 128 codes], then scales.

    Of one line and one tile of inputs there are `runs` scales, [tiles of outputs, tiles of inputs, runs, 16]:

    - integers: the scale of 128 / `runs` inputs, and maybe the same of zeros
    - MXFP8 and MXFP4: one word of four exponents
    - NVFP4: two words of four small floats, of the even and of the odd blocks; then factors [outputs]

    FP8 has one scale of 128 inputs and `block_rows` outputs, [blocks of outputs, tiles of inputs], or without `runs`
    one for each output, [outputs]. Both are times 2**60.
    """

    block_rows: int = 0
    runs: int = 0

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int4", "int8")

    @property
    def pairs(self) -> int:
        """Return the number of pairs of codes in a word."""
        return len(PLACES[self.kind]) // 2

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        return self.unpacked(stored).decode()

    def unpacked(self, stored: Stored) -> Stored:
        """Return the same numbers in the format that they came from, or in one with a scale wherever tiles have one."""
        words, scales, *more = stored.tensors
        outputs, inputs, kind = stored.outputs, stored.inputs, self.kind
        codes = unplaced(words, PLACES[kind])[..., :outputs, :inputs].to(torch.uint8)
        if kind == "fp8":
            own = scales * 2.0 ** -FACTORS[kind]
            if self.runs:
                return Stored(Fp8(self.block_rows, STEP), (codes.view(E4M3), own), outputs, inputs)
            return Stored(Fp8(1, inputs), (codes.view(E4M3), own[..., :outputs].unsqueeze(-1)), outputs, inputs)
        if self.is_integer:
            # A byte for each number.
            zeros = more[0] if more else torch.full_like(scales, 1 << (int(kind[3]) - 1), dtype=torch.uint8)
            tensors = (codes, *(by_line(each)[..., :outputs, :] for each in (scales, zeros)))
            return Stored(Grouped(8, STEP // self.runs, True), tensors, outputs, inputs)
        own = bytes_of(scales)[..., :outputs, : -(-inputs // (SHORT_BLOCK if kind == "nvfp4" else BLOCK))]
        if kind == "nvfp4":
            small = torch.ldexp(8.0 + (own & 7), (own >> 3).int() - SMALL_BIAS - 3).to(E4M3).view(torch.uint8)
            return Stored(Nvfp4(), (paired(codes), small, more[0][..., :outputs].unsqueeze(-1)), outputs, inputs)
        exponents = own.int() - EXPONENT_SHIFTS[kind]
        if kind == "mxfp4":
            return Stored(Mxfp4(), (paired(codes), exponents.to(torch.uint8)), outputs, inputs)
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - EXPONENT_BIAS)
        return Stored(Fp8(1, BLOCK), (codes.view(E4M3), powers), outputs, inputs)

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        by_block = self.kind == "fp8" and self.runs > 0
        if start % LINES or (by_block and start % self.block_rows):
            return None
        first, last = start // LINES, -(-end // LINES)

        def cut(tensor: Tensor) -> Tensor:
            dims = tensor.ndim - (stored.tensors[0].ndim - 4)
            return tensor[..., first:last, :, :, :] if dims == 4 else tensor[..., first * LINES : last * LINES]

        codes, scales, *more = stored.tensors
        own = scales[..., start // self.block_rows : -(-end // self.block_rows), :] if by_block else cut(scales)
        return Stored(self, (cut(codes), own, *map(cut, more)), end - start, stored.inputs)


def tiles_named(kind: str, block_rows: int = 0, runs: int = 0) -> CodeTiles:
    return CodeTiles(f"{kind} in tiles {VERSIONS[kind]}", block_rows, runs)


def pack(stored: Stored) -> Stored:
    """Return a matrix in the layout that kernels read fastest, or as it is."""
    form, found = stored.format, None
    if isinstance(form, Fp8) and form.block_columns == BLOCK < stored.inputs:
        found = packed_mxfp8(stored, form)
    elif isinstance(form, Fp8):
        found = packed_fp8(stored, form)
    elif isinstance(form, Mxfp4):
        found = packed_mxfp4(stored)
    elif isinstance(form, Nvfp4):
        found = packed_nvfp4(stored)
    elif isinstance(form, Grouped):
        found = packed_integers(stored, form)
    return stored if found is None else found


def packed_fp8(stored: Stored, form: Fp8) -> Stored | None:
    codes, scales = stored.tensors
    whole = form.block_columns >= stored.inputs
    if not whole and form.block_columns % STEP:
        return None
    scales = scales * 2.0 ** FACTORS["fp8"]
    # Factors of other sizes would leave float32 on the way.
    if not bool((scales.isfinite() & (scales.abs() < 2.0**67)).all()):
        return None
    if whole and (form.block_rows == 1 or stored.inputs > 2 * STEP):
        own = padded_lines(scales.squeeze(-1).repeat_interleave(form.block_rows, -1)[..., : stored.outputs])
        layout = tiles_named("fp8")
    else:
        steps = -(-stored.inputs // STEP)
        own = scales.repeat_interleave(max(1, -(-form.block_columns // STEP)), -1)[..., :steps]
        layout = tiles_named("fp8", form.block_rows, 1)
    return Stored(layout, (placed_bytes(codes, "fp8"), own.contiguous()), stored.outputs, stored.inputs)


def packed_mxfp8(stored: Stored, form: Fp8) -> Stored | None:
    codes, scales = stored.tensors
    mantissas, exponents = torch.frexp(scales)
    raised = exponents - 1 + EXPONENT_BIAS + EXPONENT_SHIFTS["mxfp8"]
    if not bool(((mantissas == 0.5) & (raised >= 0) & (raised <= MOST_EXPONENT)).all()):
        return None
    own = raised.to(torch.uint8).repeat_interleave(form.block_rows, -2)[..., : stored.outputs, :]
    tensors = (placed_bytes(codes, "mxfp8"), words_of_bytes(own, 1))
    return Stored(tiles_named("mxfp8", runs=1), tensors, stored.outputs, stored.inputs)


def packed_mxfp4(stored: Stored) -> Stored | None:
    codes, scales = stored.tensors
    if int(scales.max()) > MOST_EXPONENT - EXPONENT_SHIFTS["mxfp4"]:
        return None
    tensors = (placed(codes, halves, PLACES["mxfp4"]), words_of_bytes(scales + EXPONENT_SHIFTS["mxfp4"], 1))
    return Stored(tiles_named("mxfp4", runs=1), tensors, stored.outputs, stored.inputs)


def packed_nvfp4(stored: Stored) -> Stored | None:
    codes, scales, factors = stored.tensors
    if int(scales.max()) > MOST_SCALE:
        return None
    # The scale zero has no place among the small floats: its codes are zero instead.
    codes = codes * (scales != 0).repeat_interleave(SHORT_BLOCK // 2, -1)
    mantissas, exponents = torch.frexp(scales.contiguous().view(E4M3).float())
    small = (exponents - 1 + SMALL_BIAS) * 8 + (mantissas * 16 - 8).int()
    tensors = (
        placed(codes, halves, PLACES["nvfp4"]),
        words_of_bytes(torch.where(scales == 0, 0, small).to(torch.uint8), 2),
        padded_lines(factors.squeeze(-1)),
    )
    return Stored(tiles_named("nvfp4", runs=2), tensors, stored.outputs, stored.inputs)


def packed_integers(stored: Stored, form: Grouped) -> Stored | None:
    codes, *scales = stored.tensors
    kind, whole = f"int{form.bits}", form.group >= stored.inputs
    pairs = len(PLACES[kind]) // 2
    if form.bits == 8 and form.has_zeros:
        return None
    # A scale belongs to all inputs of a tile, or to those of one pair of its words or of two.
    runs = 1 if whole or form.group % STEP == 0 else STEP // form.group if STEP % form.group == 0 else 0
    if not 0 < runs <= pairs:
        return None
    steps = -(-stored.inputs // STEP)
    repeats = steps if whole else max(1, form.group // STEP)
    own = (by_step(each.repeat_interleave(repeats, -1)[..., : steps * runs], runs) for each in scales)
    words = placed(codes, halves if form.bits == 4 else as_they_are, PLACES[kind], stored.inputs)
    return Stored(tiles_named(kind, runs=runs), (words, *own), stored.outputs, stored.inputs)


# Scales ---------------------------------------------------------------------------------------------------------------


def padded_lines(of_outputs: Tensor) -> Tensor:
    """Return what each output has, and zeros for the lines that the last tile has beyond them."""
    padded: Tensor = torch.nn.functional.pad(of_outputs, (0, -of_outputs.shape[-1] % LINES))
    return padded.contiguous()


def by_step(matrix: Tensor, runs: int) -> Tensor:
    """Return [outputs, tiles of inputs * runs] as [tiles of outputs, tiles of inputs, runs, 16]."""
    return in_tiles(matrix, runs).transpose(-1, -2).contiguous()


def by_line(scales: Tensor) -> Tensor:
    """Undo `by_step`."""
    found: Tensor = scales.permute(*range(scales.ndim - 4), -4, -1, -3, -2).flatten(-2).flatten(-3, -2)
    return found


def words_of_bytes(matrix: UInt8[Tensor, "*experts outputs blocks"], runs: int) -> Tensor:
    """Return bytes of the blocks of lines as words of four, by step: of `runs` words, each has every other block."""
    tiles = in_tiles(matrix, 4 * runs).unflatten(-1, (4, runs)).transpose(-1, -2).flatten(-2)
    words: Tensor = tiles.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return words.transpose(-1, -2).contiguous()


def bytes_of(words: Int[Tensor, "*tiles runs 16"]) -> UInt8[Tensor, "*experts outputs blocks"]:
    """Undo `words_of_bytes`."""
    of_line = by_line(words).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    found: Tensor = of_line.unflatten(-1, (-1, words.shape[-2], 4)).transpose(-1, -2).flatten(-3)
    return found


# Codes ----------------------------------------------------------------------------------------------------------------


def in_tiles(matrix: Tensor, width: int) -> Tensor:
    """Return a matrix, or those of experts, in tiles of 16 lines and `width` columns, padded with zeros."""
    *_, lines, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % width, 0, -lines % LINES))
    found: Tensor = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, LINES)).transpose(-3, -2).contiguous()
    return found


def as_they_are(codes: Tensor) -> Tensor:
    return codes


def placed_bytes(codes: Tensor, kind: str) -> Int[Tensor, "*tiles words"]:
    """Return codes of eight bits in tiles."""
    return placed(codes.view(torch.uint8), as_they_are, PLACES[kind])


def placed(
    codes: Tensor, numbers: Callable[[Tensor], Tensor], places: Sequence[Runs], inputs: int | None = None
) -> Int[Tensor, "*tiles words"]:
    """Return codes in tiles, with their bits where `places` wants them. A few lines are packed at a time.

    `inputs`: how many of the numbers of a line are meant.
    """
    *experts, lines, _ = codes.shape
    columns = inputs or numbers(codes[..., :1, :]).shape[-1]
    many = codes.reshape(-1, lines, codes.shape[-1])
    groups, steps, size = -(-lines // LINES), -(-columns // STEP), STEP // len(places)
    out = torch.empty(len(many), groups, steps, LINES, size, dtype=torch.int32, device=codes.device)
    at_once = max(1, AT_ONCE // (LINES * columns))
    for number in range(len(many)):
        for first in range(0, groups, at_once):
            some = many[number, first * LINES : (first + at_once) * LINES]
            tiles = in_tiles(numbers(some)[..., :columns], STEP)
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
