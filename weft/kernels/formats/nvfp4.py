"""NVFP4: four-bit floats, an FP8 scale for each 16 adjacent inputs, and one float32 for the whole matrix.

compressed-tensors stores the inverse of that float32, ModelOpt the float32 itself. Here every output has its own, so
that matrices with different ones can be one: each keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.errors import ModelError
from weft.kernels.formats.groups import paired
from weft.kernels.formats.mxfp4 import MAGNITUDES, nearest_codes, numbers_of
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Format, Stored

# Inputs of a block.
BLOCK = 16
LARGEST_SCALE = 448.0
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True, slots=True)
class Nvfp4(Format):
    """NVFP4. Tensors: codes [outputs, inputs / 2], the first of a pair in the low half, scales [outputs, blocks] as the
    bytes of e4m3, and factors [outputs, 1] in float32. A number is code * scale * factor.
    """

    name: str = "nvfp4 1"

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        codes, scales, factors = stored.tensors
        own = scales.contiguous().view(torch.float8_e4m3fn).float() * factors
        found: Tensor = (numbers_of(codes).unflatten(-1, (-1, BLOCK)) * own.unsqueeze(-1)).flatten(-2)
        return found

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        chosen = tuple(each.index_select(-2, index) for each in stored.tensors)
        return replace(stored, tensors=chosen, outputs=len(index))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        return replace(stored, tensors=tuple(each[..., start:end, :] for each in stored.tensors), outputs=end - start)

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        if start % BLOCK or end % BLOCK:
            return None
        codes, scales, factors = stored.tensors
        own = (codes[..., start // 2 : end // 2], scales[..., start // BLOCK : end // BLOCK], factors)
        return replace(stored, tensors=own, inputs=end - start)

    def stacked(self, parts: Sequence[Stored]) -> Stored:
        tensors = tuple(torch.cat(each, -2) for each in zip(*(part.tensors for part in parts), strict=True))
        return replace(parts[0], tensors=tensors, outputs=sum(part.outputs for part in parts))

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        factors = parts[0].tensors[2]
        if not all(torch.equal(part.tensors[2], factors) for part in parts):
            return None
        codes, scales = (torch.cat([part.tensors[k] for part in parts], -1) for k in (0, 1))
        return replace(parts[0], tensors=(codes, scales, factors), inputs=sum(part.inputs for part in parts))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored:
        codes, scales, factors = stored.tensors
        own = factor.view(-1, 1) if isinstance(factor, Tensor) else factor
        return replace(stored, tensors=(codes, scales, factors * own))

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers as NVFP4 whose largest has the largest scale."""
        blocks = matrix.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        factor = (largest.amax((-1, -2), keepdim=True) / (LARGEST_SCALE * MAGNITUDES[-1])).clamp(min=2.0**-100)
        scales = (largest / MAGNITUDES[-1] / factor).to(torch.float8_e4m3fn)
        own = (scales.float() * factor).unsqueeze(-1)
        codes = nearest_codes(torch.where(own > 0, blocks / own, 0.0)).flatten(-2)
        factors = factor.expand(*matrix.shape[:-1], 1).contiguous()
        return Stored(self, (paired(codes), scales.view(torch.uint8), factors), *matrix.shape[-2:])

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return outputs * (inputs // 2 + inputs // BLOCK + 4)


def _reader(divides: bool) -> Spelling:
    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        codes, scales, whole = tensors
        factor = whole.float().reshape(*codes.shape[:-2], 1, 1)
        if not bool(((factor > 0) & factor.isfinite()).all()):
            raise ModelError("the global scale of an NVFP4 matrix must be a positive number")
        factors = (1 / factor if divides else factor).expand(*codes.shape[:-1], 1).contiguous()
        return Stored(Nvfp4(), (codes, scales.view(torch.uint8), factors), codes.shape[-2], 2 * codes.shape[-1])

    names = ("_packed", "_scale", "_global_scale") if divides else ("", "_scale", "_scale_2")
    return Spelling("nvfp4", names, (("U8",), ("F8_E4M3",), ("F32", "BF16", "F16")), sizes, read)


def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
    """Return the sizes of the stored matrix, or why its tensors do not belong together."""
    codes, scales, whole = shapes
    if len(codes) < 2:
        return f"codes have shape {list(codes)}, which is no matrix"
    *outer, size = codes
    wanted = (*outer, 2 * size // BLOCK)
    if scales != wanted or 2 * size % BLOCK:
        return f"scales have shape {list(scales)}, expected {list(wanted)}"
    experts = tuple(outer[:-1])
    if whole not in (experts, (*experts, 1), (*experts, 1, 1)):
        return f"the global scale has shape {list(whole)}, expected {[*experts, 1]}"
    return *outer, 2 * size


SPELLINGS = (_reader(divides=True), _reader(divides=False))


def claim(statement: Statement) -> Scheme | None:
    """Return what a configuration states, if it is NVFP4."""
    packed = statement.format == "nvfp4-pack-quantized" and (statement.kind, statement.bits) == ("float", 4)
    return Scheme("nvfp4") if packed or statement.algorithm in ALGORITHMS else None


def of(scheme: Scheme, outputs: int, inputs: int) -> Nvfp4 | None:
    """Return the format of a matrix of this size."""
    return Nvfp4() if scheme.kind == "nvfp4" and inputs % BLOCK == 0 else None
