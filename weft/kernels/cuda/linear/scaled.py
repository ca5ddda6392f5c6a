"""Matmuls of many rows in FP8 with weights in FP8, by torch's library, which scales each 128 inputs on the way.

It reads scales in other orders than our kernels: those of rows column by column, and those of blocks of weights with
their columns padded to whole fours.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import ScalingType

from weft.kernels.cuda.formats.lines import CodeLines
from weft.kernels.cuda.formats.packed import STEP
from weft.kernels.cuda.launch.gpus import HOPPER, gpu_of
from weft.kernels.cuda.linear.packed import is_wide
from weft.kernels.cuda.linear.rounding import HELD, LazyProduct, rows_in_fp8
from weft.kernels.formats.stored import Stored

# Rows from which it is faster on an H200, if the matrix is wide and if it is not.
WIDE_ROWS, NARROW_ROWS = 33, 65
# The first CUDA whose library has such scales, and the outputs of a block that it scales.
CUDA, BLOCK = (12, 9), 128
# The library needs addresses of lines that are multiples of this number of bytes.
ALIGNED = 16


class Scales(NamedTuple):
    """Scales of a matrix as the library reads them: [outputs, steps], or of blocks [steps in whole fours, blocks].

    Both lie column by column.
    """

    kind: ScalingType
    tensor: Float[Tensor, "some others"]


@cache
def has_scales(device: torch.device) -> bool:
    """Return whether the library of this device multiplies FP8 with a scale for each 128 inputs."""
    if device.type != "cuda" or gpu_of(device).capability[0] != HOPPER[0]:
        return False
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) >= CUDA


def is_faster(rows: int, outputs: int) -> bool:
    """Return whether the library takes less time than `multiply_packed`.

    >>> is_faster(64, 22656), is_faster(64, 4480), is_faster(128, 4480)
    (True, False, True)
    """
    return rows >= (WIDE_ROWS if is_wide(outputs) else NARROW_ROWS)


def can_scale(part: Stored) -> bool:
    """Return whether the library multiplies rows in FP8 with this matrix."""
    form = part.format
    if not isinstance(form, CodeLines) or part.outputs % HELD or part.outputs < BLOCK:
        return False
    return (not form.runs or form.block_rows == BLOCK) and has_scales(part.tensors[0].device)


def by_scales(rows: int, part: Stored) -> bool:
    """Return whether the library is to multiply this number of rows with this matrix."""
    return is_faster(rows, part.outputs) and can_scale(part)


def multiply_scaled(
    x: Float[Tensor, "rows inputs"] | LazyProduct,
    part: Stored,
    bias: Float[Tensor, " outputs"] | None,
    out: Float[Tensor, "held outputs"],
) -> None:
    """Fill `out`. It is fastest if it has as many rows as `held_rows` says: then those beyond `x` may be anything."""
    codes, factors = rows_in_fp8(x, by_column=True)
    whole = len(out) == len(codes) and out.data_ptr() % ALIGNED == out.stride(0) * out.itemsize % ALIGNED == 0
    found = out if whole else torch.empty(len(codes), part.outputs, dtype=out.dtype, device=out.device)
    scaled_product(codes, factors, part.tensors[0], scales_of(part), found)
    if bias is not None:
        found.add_(bias)
    if not whole:
        out.copy_(found[: len(out)])


def scales_of(part: Stored) -> Scales:
    """Return the scales of a matrix as the library reads them."""
    form, scales = part.format, part.tensors[1]
    assert isinstance(form, CodeLines)
    if not form.runs:
        # One scale for each 128 inputs of an output.
        steps = -(-part.inputs // STEP)
        return Scales(ScalingType.BlockWise1x128, scales.expand(steps, -1).contiguous().t())
    own = F.pad(scales, (0, -scales.shape[1] % 4)) if scales.shape[1] % 4 else scales
    return Scales(ScalingType.BlockWise128x128, own.t())


def scaled_product(
    codes: Tensor, factors: Float[Tensor, "held steps"], weights: Tensor, scales: Scales, out: Float[Tensor, "held n"]
) -> None:
    """Fill `out` with the product. What `torch.nn.functional.scaled_mm` calls, which has no `out`, checks layouts."""
    torch.ops.aten._scaled_mm_v2.out(
        codes, weights.t(), [factors], [ScalingType.BlockWise1x128.value], [], [scales.tensor], [scales.kind.value], [],
        None, out.dtype, [], False, out=out,
    )  # fmt: skip
