"""Panels of matrices in stored formats, as stored.h and codes.h read them.

A panel holds 32 outputs: units of one or eight blocks of 32 inputs. A unit has the scales that its blocks share, and
each block its own scales, then codes, interleaved so that one vector holds those of several outputs. Codes have no
sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Int32, UInt8
from torch import Tensor

from weft.kernels.formats import block_types
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped, halves
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import Format, Stored
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.native.library import use

# Outputs of a panel and of a strip; inputs of a block.
PANEL, STRIP, BLOCK = 32, 16, 32
# In the order of stored.h.
KINDS = ("floats", "brains", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
         "mxfp4", "fp8", "int4", "int4_zeros", "int8", "int8_zeros", "nvfp4")  # fmt: skip
# Numbers of a matrix that are packed together.
PACKED = 1 << 20
# Codes that are no number.
FP8_NONE, MXFP4_NONE = 0x7F, 0xFF
# Of each byte of a word.
LOW_HALVES, LOWEST_BITS, LOWEST_PAIRS = 0x0F0F0F0F, 0x01010101, 0x03030303

Bytes = UInt8[Tensor, "*blocks bytes"]
Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A matrix taken apart: codes without sign, scales that several blocks share, and those of single blocks."""

    codes: UInt8[Tensor, "*experts outputs inputs"]
    shared: UInt8[Tensor, "*experts outputs units each size"]
    own: UInt8[Tensor, "*experts outputs blocks scales"] | None = None


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How the bytes of a kind are taken apart, and the bits of its codes. Sizes are of one output."""

    bits: int
    parse: Callable[[Bytes], tuple[Tensor, Tensor, Tensor | None]]
    shared_bytes: int
    own_bytes: int = 0
    blocks: int = 1  # of a unit

    @property
    def unit_bytes(self) -> int:
        return self.shared_bytes + self.blocks * (self.own_bytes + BLOCK * self.bits // 8)


def _words(block: Bytes) -> Int32[Tensor, "*blocks words"]:
    """Return four adjacent bytes as one number, so that one operation does something with all of them."""
    return block.contiguous().view(torch.int32)


def _nibbles(block: Bytes) -> Bytes:
    words = _words(block)
    return torch.cat((words & LOW_HALVES, (words >> 4) & LOW_HALVES), -1).view(torch.uint8)


def _fifth(block: Bytes) -> Bytes:
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((block.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _runs_of_64(block: Bytes) -> Bytes:
    """Return nibbles of which 32 low ones come before 32 high ones."""
    return _nibbles(block.unflatten(-1, (-1, 32))).flatten(-2)


def _fours(places: slice, first: int) -> Callable[[Bytes], tuple[Tensor, Tensor, None]]:
    return lambda block: (_nibbles(block[..., first:]), block[..., places], None)


def _fives(places: slice, first: int) -> Callable[[Bytes], tuple[Tensor, Tensor, None]]:
    def parse(block: Bytes) -> tuple[Tensor, Tensor, None]:
        return _nibbles(block[..., first + 4 :]) | _fifth(block[..., first : first + 4]), block[..., places], None

    return parse


def _q8_0(block: Bytes) -> tuple[Tensor, Tensor, None]:
    return block[..., 2:] ^ 0x80, block[..., :2], None


def _levels(block: Bytes) -> tuple[Tensor, Tensor]:
    scales, least = block_types.six_bit_scales(block[..., 4:16])
    return block[..., :4], torch.stack((scales, least), -1)


def _q4_k(block: Bytes) -> tuple[Tensor, Tensor, Tensor]:
    return _runs_of_64(block[..., 16:]), *_levels(block)


def _q5_k(block: Bytes) -> tuple[Tensor, Tensor, Tensor]:
    shifts = torch.arange(8, dtype=torch.int32).unsqueeze(-1)
    fifth = ((_words(block[..., 16:48]).unsqueeze(-2) >> shifts) & LOWEST_BITS).flatten(-2) << 4
    return _runs_of_64(block[..., 48:]) | fifth.view(torch.uint8), *_levels(block)


def _q6_k(block: Bytes) -> tuple[Tensor, Tensor, Tensor]:
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32).unsqueeze(-1)
    halves = _words(block[..., 128:192].unflatten(-1, (2, 32))).unsqueeze(-2)
    high = ((halves >> shifts) & LOWEST_PAIRS).flatten(-3) << 4
    return low | high.view(torch.uint8), block[..., 208:], block[..., 192:208].unflatten(-1, (8, 2))


def _iq4_xs(block: Bytes) -> tuple[Tensor, Tensor, Tensor]:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((block[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    low = torch.stack((block[..., 4:8] & 15, block[..., 4:8] >> 4), -1).flatten(-2)
    scales = ((low | (high << 4)).to(torch.int8) - 32).view(torch.uint8)
    codes = _nibbles(block[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return codes, block[..., :2], scales.unsqueeze(-1)


ONE_SCALE, TWO_SCALES = slice(0, 2), slice(0, 4)
FORMATS = {
    "q8_0": CodeLayout(8, _q8_0, 2),
    "q4_0": CodeLayout(4, _fours(ONE_SCALE, 2), 2),
    "q4_1": CodeLayout(4, _fours(TWO_SCALES, 4), 4),
    "q5_0": CodeLayout(5, _fives(ONE_SCALE, 2), 2),
    "q5_1": CodeLayout(5, _fives(TWO_SCALES, 4), 4),
    "q4_k": CodeLayout(4, _q4_k, 4, 2, 8),
    "q5_k": CodeLayout(5, _q5_k, 4, 2, 8),
    "q6_k": CodeLayout(6, _q6_k, 2, 2, 8),
    "iq4_nl": CodeLayout(4, _fours(ONE_SCALE, 2), 2),
    "iq4_xs": CodeLayout(4, _iq4_xs, 2, 1, 8),
    "mxfp4": CodeLayout(4, _fours(slice(0, 1), 1), 1),
}
NAMES: dict[Format, str] = {
    block_types.Q8_0: "q8_0",
    block_types.Q4_0: "q4_0",
    block_types.Q4_1: "q4_1",
    block_types.Q5_0: "q5_0",
    block_types.Q5_1: "q5_1",
    block_types.Q4_K: "q4_k",
    block_types.Q5_K: "q5_k",
    block_types.Q6_K: "q6_k",
    block_types.IQ4_NL: "iq4_nl",
    block_types.IQ4_XS: "iq4_xs",
    block_types.MXFP4: "mxfp4",
    Mxfp4(): "mxfp4",
}


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The bits of codes whose scales belong to groups of blocks; bytes of each group and of each block of an output."""

    bits: int
    header_bytes: int
    own_bytes: int = 0


GROUPS = {
    "int4": GroupLayout(4, 4),
    "int4_zeros": GroupLayout(4, 8),
    "int8": GroupLayout(8, 4),
    "int8_zeros": GroupLayout(8, 8),
    "nvfp4": GroupLayout(4, 4, 2),
}


def grouped_kind(format: Grouped | Nvfp4) -> str | None:
    """Return the kind of groups; None if their blocks would have several scales."""
    if isinstance(format, Nvfp4):
        return "nvfp4"
    name = f"int{format.bits}_zeros" if format.has_zeros else f"int{format.bits}"
    return name if format.group % BLOCK == 0 else None


def name_of(format: Format) -> str | None:
    """Return the kind of a format whose codes are multiplied as integers; None if there is none."""
    if isinstance(format, (Grouped, Nvfp4)):
        return grouped_kind(format)
    return NAMES.get(format) if isinstance(format, (BlockFormat, Mxfp4)) else None


def pack(stored: Stored, are_rounded: bool) -> Stored | None:
    """Return a matrix, or all experts', in panels; None if there is no kernel for it."""
    # Without its source, kernels that other models share would call functions that are not there.
    use({"stored"})
    if isinstance(stored.format, Fp8):
        return _pack_fp8(stored, stored.format)
    if isinstance(stored.format, (Grouped, Nvfp4)):
        return _pack_groups(stored, stored.format, are_rounded)
    name = name_of(stored.format)
    if name is None or not stored.tensors[0].numel():
        return None
    layout = StoredPanels(f"panels of {stored.format.name}", KINDS.index(name), are_rounded)
    experts = stored.tensors[0].shape[:-2]
    size = (-(-stored.outputs // PANEL), panel_bytes(layout, stored.inputs))
    panels = torch.empty(*experts, *size, dtype=torch.uint8)
    # Outputs that are packed together, so that all steps between find them in the cache.
    step = max(1, PACKED // stored.inputs // PANEL) * PANEL
    places = [
        (matrix, target, first)
        for matrix, target in zip(stored_matrices(stored), panels.view(-1, *size), strict=True)
        for first in range(0, stored.outputs, step)
    ]

    def pack_some(place: tuple[Stored, Tensor, int]) -> bool:
        matrix, target, first = place
        some = stored.format.cut_rows(matrix, first, min(first + step, stored.outputs))
        assert some is not None
        parsed = _parsed(some, FORMATS[name])
        if name == "mxfp4" and bool((parsed.shared == MXFP4_NONE).any()):
            return False
        target[first // PANEL : (first + step) // PANEL] = _in_panels(parsed, FORMATS[name])
        return True

    return Stored(layout, (panels,), stored.outputs, stored.inputs) if all_of(pack_some, places) else None


def all_of(work: Callable[[Place], bool], places: Sequence[Place]) -> bool:
    """Return whether all pieces of work succeed, which share the cores, each with one thread.

    The threads of one operation would wait for each other: with another program on one of two cores, ten times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if min(threads, len(places)) == 1:
            return all(map(work, places))
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return all(pool.map(work, places))
    finally:
        torch.set_num_threads(threads)


def stored_matrices(stored: Stored) -> Iterator[Stored]:
    """Return one matrix, or that of each expert."""
    if stored.tensors[0].ndim == 2:
        yield stored
    else:
        yield from (stored.expert(number) for number in range(stored.experts))


def _parsed(stored: Stored, own: CodeLayout) -> Parsed:
    if isinstance(stored.format, Mxfp4):
        codes, scales = stored.tensors
        return Parsed(torch.stack((codes & 15, codes >> 4), -1).flatten(-2), scales[..., None, None])
    assert isinstance(stored.format, BlockFormat)
    codes, shared, scales_of_blocks = own.parse(stored.tensors[0].unflatten(-1, (-1, stored.format.bytes)))
    size = 1 if own.shared_bytes == 1 else 2
    return Parsed(
        codes.flatten(-2),
        shared.unflatten(-1, (-1, size)),
        None if scales_of_blocks is None else scales_of_blocks.flatten(-3, -2),
    )


def panel_bytes(layout: StoredPanels, inputs: int) -> int:
    """Return the size of a panel."""
    group = GROUPS.get(KINDS[layout.kind])
    if group is not None:
        blocks = inputs // BLOCK * (BLOCK * group.bits // 8 + group.own_bytes)
        return PANEL * (blocks + group.header_bytes * -(-inputs // layout.columns))
    if layout.columns:
        return PANEL * (4 * -(-inputs // layout.columns) + inputs)
    own = FORMATS[KINDS[layout.kind]]
    return PANEL * own.unit_bytes * (inputs // (BLOCK * own.blocks))


def _by_panel(values: Tensor, outputs_at: int) -> Tensor:
    """Return values with the dimension of outputs, counted from the end, as panels and outputs; zeros fill the last."""
    filled = F.pad(values, (*(0, 0) * (outputs_at - 1), 0, -values.shape[-outputs_at] % PANEL))
    found: Tensor = filled.unflatten(-outputs_at, (-1, PANEL))
    return found


def _in_panels(parsed: Parsed, kind: CodeLayout) -> UInt8[Tensor, "*experts panels bytes"]:
    blocks = _planes(_by_quad(parsed.codes), kind.bits)
    if parsed.own is not None:
        own = _by_panel(parsed.own, 3).movedim(-3, -1).flatten(-2)
        blocks = torch.cat((own, blocks), -1)
    units = blocks.unflatten(-2, (-1, kind.blocks)).flatten(-2)
    # [panels, units, scales, outputs, bytes]
    shared = _by_panel(parsed.shared, 4).movedim(-4, -2).flatten(-3)
    return torch.cat((shared, units), -1).flatten(-2)


def _by_quad(codes: UInt8[Tensor, "*experts outputs inputs"]) -> Int32[Tensor, "*experts panels blocks strips 8 16"]:
    """Return the four codes of each quad as one word, in the order of panels."""
    words = _by_panel(codes.contiguous().view(torch.int32), 2).unflatten(-1, (-1, 8)).unflatten(-3, (2, STRIP))
    # From [panels, strips, outputs of a strip, blocks, quads].
    found: Tensor = words.movedim(-2, -4).movedim(-1, -2).contiguous()
    return found


def _planes(words: Int32[Tensor, "*blocks strips 8 16"], bits: int) -> UInt8[Tensor, "*blocks bytes"]:
    """Return the codes of both strips as bytes: whole, or halves of two quads and planes of what is above them."""
    if bits < 8:
        low = words & LOW_HALVES
        planes = [low[..., 0::2, :] | (low[..., 1::2, :] << 4)]
        above = {5: (1, LOWEST_BITS), 6: (2, LOWEST_PAIRS)}.get(bits)
        if above is not None:
            width, mask = above
            high = ((words >> 4) & mask).unflatten(-2, (-1, 8 // width))
            planes.append(reduce(torch.bitwise_or, [high[..., n, :] << (width * n) for n in range(8 // width)]))
        words = torch.cat(planes, -2)
    return words.flatten(-3).view(torch.uint8)


def _pack_fp8(stored: Stored, format: Fp8) -> Stored | None:
    codes, scales = stored.tensors[0].view(torch.uint8), stored.tensors[1]
    if not codes.numel() or bool(((codes & FP8_NONE) == FP8_NONE).any()):
        return None
    columns, blocks = format.block_columns, scales.shape[-1]
    by_row = scales.repeat_interleave(format.block_rows, -2)[..., : stored.outputs, :].contiguous()
    by_input = _by_panel(codes, 2).transpose(-1, -2)
    by_block = _by_panel(by_row, 2).transpose(-1, -2).contiguous().view(torch.uint8)
    pieces = []
    for block in range(blocks):
        pieces += [by_block[..., block, :], by_input[..., block * columns : (block + 1) * columns, :].flatten(-2)]
    layout = StoredPanels(f"panels of {format.name}", KINDS.index("fp8"), False, columns)
    return Stored(layout, (torch.cat(pieces, -1).contiguous(),), stored.outputs, stored.inputs)


def _pack_groups(stored: Stored, format: Grouped | Nvfp4, are_rounded: bool) -> Stored | None:
    name = grouped_kind(format)
    if name is None or stored.inputs % BLOCK or not stored.tensors[0].numel():
        return None
    own = GROUPS[name]
    codes, header, scales, group = _of_groups(stored, format) if isinstance(format, Grouped) else _of_runs(stored)
    if bool(((scales & FP8_NONE) == FP8_NONE).any()):
        return None
    blocks = _planes(_by_quad(codes), own.bits)
    if own.own_bytes:
        # [panels, blocks, scales, outputs]
        blocks = torch.cat((_by_panel(scales, 3).movedim(-3, -1).flatten(-2), blocks), -1)
    # [panels, groups, scales, outputs, bytes of a float]
    headers = _by_panel(header.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)), 4).movedim(-4, -2).flatten(-3)
    each = group // BLOCK
    pieces = []
    for number in range(headers.shape[-2]):
        pieces += [headers[..., number, :], blocks[..., number * each : (number + 1) * each, :].flatten(-2)]
    layout = StoredPanels(f"panels of {format.name}", KINDS.index(name), are_rounded, group)
    return Stored(layout, (torch.cat(pieces, -1).contiguous(),), stored.outputs, stored.inputs)


Groups = tuple[Tensor, Tensor, Tensor, int]


def _of_groups(stored: Stored, format: Grouped) -> Groups:
    """Return codes, float32 of groups [outputs, groups, scales], no scales of blocks, and the inputs of a group."""
    # The greatest power of two in a group; a group of all inputs is longer than they are.
    group = format.group & -format.group
    if format.group == stored.inputs:
        group = 1 << (stored.inputs - 1).bit_length()
    factors = stored.tensors[1].float()
    values = [factors]
    if format.has_zeros:
        values.append((format.middle - stored.tensors[2].float()) * factors)
    header = torch.stack(values, -1)
    if group < format.group:
        header = header.repeat_interleave(format.group // group, -2)[..., : -(-stored.inputs // group), :]
    return format.codes_of(stored), header, factors.new_zeros(0, dtype=torch.uint8), group


def _of_runs(stored: Stored) -> Groups:
    """Return the same of NVFP4, whose blocks have two scales. Kernels double its codes."""
    codes, scales, factors = stored.tensors
    group = max(BLOCK, 1 << (stored.inputs - 1).bit_length())
    return halves(codes), (factors / 2).unsqueeze(-1), scales.unflatten(-1, (-1, 2)), group
