"""MXFP4: four-bit floats, two in a byte, and a power of two for each 32 adjacent inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.formats.groups import paired
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Stored
from weft.kernels.formats.written import Stating, WrittenFormat, stated

# Sign, two bits of exponent, one of mantissa; the sign is the highest bit.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127
# Inputs of a block.
BLOCK = 32
# Numbers that are quantised at a time.
ENCODED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Mxfp4(WrittenFormat):
    """MXFP4. Tensors: codes [outputs, inputs / 2], the first of a pair in the low half, and scales [outputs, blocks].

    A scale is the exponent of a power of two, plus 127.
    """

    name: str = "mxfp4 1"

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        codes, scales = stored.tensors
        blocks = numbers_of(codes).unflatten(-1, (-1, BLOCK))
        found: Tensor = torch.ldexp(blocks, (scales.int() - EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)
        return found

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        return replace(
            stored, tensors=tuple(each.index_select(-2, index) for each in stored.tensors), outputs=len(index)
        )

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        return replace(stored, tensors=tuple(each[..., start:end, :] for each in stored.tensors), outputs=end - start)

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        if start % BLOCK or end % BLOCK:
            return None
        codes, scales = stored.tensors
        own = (codes[..., start // 2 : end // 2], scales[..., start // BLOCK : end // BLOCK])
        return replace(stored, tensors=own, inputs=end - start)

    def stacked(self, parts: Sequence[Stored]) -> Stored:
        tensors = tuple(torch.cat(each, -2) for each in zip(*(part.tensors for part in parts), strict=True))
        return replace(parts[0], tensors=tensors, outputs=sum(part.outputs for part in parts))

    def abreast(self, parts: Sequence[Stored]) -> Stored:
        tensors = tuple(torch.cat(each, -1) for each in zip(*(part.tensors for part in parts), strict=True))
        return replace(parts[0], tensors=tensors, inputs=sum(part.inputs for part in parts))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored | None:
        return stored if not isinstance(factor, Tensor) and factor == 1.0 else None

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers as MXFP4. The largest of a block is cut off where that makes its squared error smaller."""
        *experts, outputs, inputs = matrix.shape
        rows = matrix.reshape(-1, inputs)
        step = max(1, ENCODED_AT_ONCE // inputs)
        pieces = [self._encoded(rows[first : first + step].float()) for first in range(0, len(rows), step)]
        tensors = tuple(torch.cat(each).view(*experts, outputs, -1) for each in zip(*pieces))
        return Stored(self, tensors, outputs, inputs)

    def _encoded(self, rows: Float[Tensor, "rows inputs"]) -> tuple[Tensor, Tensor]:
        blocks = rows.unflatten(-1, (-1, BLOCK))
        whole = (blocks.abs().amax(-1).clamp(min=2.0**-100) / MAGNITUDES[-1]).log2().ceil()
        tried = []
        for exponents in (whole, whole - 1):
            powers = exponents.exp2().unsqueeze(-1)
            codes = paired(nearest_codes(blocks / powers))
            error = (numbers_of(codes) * powers - blocks).square().sum(-1)
            tried.append((error, codes, (exponents + EXPONENT_BIAS).to(torch.uint8)))
        (error, codes, scales), (cut_error, cut_codes, cut_scales) = tried
        is_cut = cut_error < error
        found = torch.where(is_cut.unsqueeze(-1), cut_codes, codes)
        return found.flatten(-2), torch.where(is_cut, cut_scales, scales)

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return outputs * (inputs // 2 + inputs // BLOCK)

    def spelled(self, stored: Stored) -> dict[str, Tensor]:
        codes, scales = stored.tensors
        return {"weight_packed": codes, "weight_scale": scales}

    def stating(self) -> Stating:
        return stated("mxfp4-pack-quantized", "float", 4, "group", group_size=BLOCK, scale_dtype="torch.uint8")


def numbers_of(codes: UInt8[Tensor, "*any bytes"]) -> Float[Tensor, "*any numbers"]:
    """Return what four-bit floats mean, two of which are in each byte."""
    pairs = torch.stack((codes & 0x0F, codes >> 4), -1).flatten(-2).int()
    exponent, last = (pairs >> 1) & 3, (pairs & 1).float()
    # Without a table, which would have to be copied to a device.
    magnitudes = torch.where(exponent == 0, 0.5 * last, torch.ldexp(1 + 0.5 * last, exponent - 1))
    return torch.where(pairs >= 8, -magnitudes, magnitudes)


def nearest_codes(numbers: Float[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
    """Return the nearest four-bit floats; larger numbers are cut off."""
    # Half-way between neighbours.
    borders = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], device=numbers.device)
    return (torch.bucketize(numbers.abs(), borders) + 8 * (numbers < 0)).to(torch.uint8)


# How checkpoints spell it ---------------------------------------------------------------------------------------------


def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
    """Return a matrix of which a checkpoint has codes, possibly block by block, and scales."""
    codes, scales = tensors
    codes = codes.flatten(-2) if codes.ndim > scales.ndim else codes
    return Stored(Mxfp4(), (codes, scales.view(torch.uint8)), codes.shape[-2], 2 * codes.shape[-1])


def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
    """Return the sizes of the stored matrix, or why its tensors do not belong together."""
    codes, scales = shapes
    if len(scales) < 2:
        return f"scales have shape {list(scales)}, which is no matrix"
    *outer, blocks = scales
    if codes not in ((*outer, blocks, BLOCK // 2), (*outer, blocks * BLOCK // 2)):
        return f"codes have shape {list(codes)}, expected {[*outer, blocks, BLOCK // 2]}"
    return *outer, blocks * BLOCK


SPELLINGS = (
    # gpt-oss, then compressed-tensors.
    Spelling("mxfp4", ("_blocks", "_scales"), (("U8",), ("U8",)), sizes, read),
    Spelling("mxfp4", ("_packed", "_scale"), (("U8",), ("U8", "F8_E8M0")), sizes, read),
)


def claim(statement: Statement) -> Scheme | None:
    """Return what a configuration states, if it is MXFP4."""
    packed = statement.format == "mxfp4-pack-quantized" and (statement.kind, statement.bits) == ("float", 4)
    return Scheme("mxfp4") if statement.method == "mxfp4" or packed else None


def of(scheme: Scheme, outputs: int, inputs: int) -> Mxfp4 | None:
    """Return the format of a matrix of this size."""
    return Mxfp4() if scheme.kind == "mxfp4" and inputs % BLOCK == 0 else None
