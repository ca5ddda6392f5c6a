"""MXFP8: e4m3, and a power of two for each 32 adjacent inputs. Kept as FP8 whose blocks are those 32 inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.mxfp4 import EXPONENT_BIAS
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Stored

# Inputs of a block.
BLOCK = 32


def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
    """Return a matrix whose scales are exponents, plus 127."""
    codes, scales = tensors
    exponents = scales.view(torch.uint8).int() - EXPONENT_BIAS
    powers = torch.ldexp(torch.ones(exponents.shape), exponents)
    return Stored(Fp8(1, BLOCK), (codes, powers), codes.shape[-2], codes.shape[-1])


def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
    """Return the sizes of the stored matrix, or why its tensors do not belong together."""
    codes, scales = shapes
    if len(codes) < 2:
        return f"codes have shape {list(codes)}, which is no matrix"
    wanted = (*codes[:-1], -(-codes[-1] // BLOCK))
    return codes if scales == wanted else f"scales have shape {list(scales)}, expected {list(wanted)}"


SPELLINGS = (Spelling("mxfp8", ("", "_scale"), (("F8_E4M3",), ("U8", "F8_E8M0")), sizes, read),)


def claim(statement: Statement) -> Scheme | None:
    """Return what a configuration states, if it is MXFP8."""
    packed = statement.format == "mxfp8-quantized" and (statement.kind, statement.bits) == ("float", 8)
    return Scheme("mxfp8") if packed or statement.algorithm == "MXFP8" else None


def of(scheme: Scheme, outputs: int, inputs: int) -> Fp8 | None:
    """Return the format of a matrix of this size."""
    return Fp8(1, BLOCK) if scheme.kind == "mxfp8" else None
