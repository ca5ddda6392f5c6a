"""The place where kernels read weights of any format: a tile of outputs and inputs, and the scales of its outputs.

A tile lies in one block of inputs, so that one scale for each output multiplies its whole sum. Codes are exact in 16
bits: tensor cores multiply them, and the scale is applied to the sum in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.formats.fp8 import fp8_form, fp8_tile
from weft.kernels.cuda.formats.mxfp4 import mxfp4_tile
from weft.kernels.cuda.launch.launching import Arguments, named
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.mxfp4 import BLOCK, Mxfp4
from weft.kernels.formats.stored import DENSE, Stored

# Inputs of a tile where a format does not need fewer, and the fewest that tensor cores multiply.
STEP, LEAST_STEP = 128, 16


class TileForm(NamedTuple):
    """What a kernel must know of a format when it is compiled."""

    format: str
    block_rows: int = 1
    block_columns: int = 1
    step: int = STEP  # inputs of a tile

    @property
    def constants(self) -> dict[str, str | int]:
        rows, columns = self.block_rows, self.block_columns
        return {"FORMAT": self.format, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "STEP": self.step}


def form_of(stored: Stored) -> TileForm | None:
    """Return how kernels read a matrix; None if they cannot."""
    found = None
    if stored.format is DENSE:
        found = TileForm("dense")
    elif isinstance(stored.format, Fp8):
        found = TileForm("fp8", *fp8_form(stored.format, stored.inputs, STEP))
    elif isinstance(stored.format, Mxfp4):
        found = TileForm("mxfp4", step=BLOCK)
    return found if found is not None and found.step >= LEAST_STEP else None


def pointers(stored: Stored) -> Arguments:
    """Return the tensors of a matrix as arguments of a kernel."""
    codes, *others = stored.tensors
    scales: Tensor | None = others[0] if others else None
    assert all(each.is_contiguous() for each in stored.tensors)
    return named(codes=codes, scales=scales)


@triton.jit
def load_tile(
    codes, scales, expert, output, column, outputs, inputs,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile [outputs, inputs] of an expert's codes, and the scales of its outputs; zeros beyond the matrix."""
    real = (output < outputs)[:, None] & (column < inputs)[None, :]
    if FORMAT == "fp8":
        tile, scale = fp8_tile(codes, scales, expert, output, column, outputs, inputs, real, BLOCK_ROWS, BLOCK_COLUMNS)
    elif FORMAT == "mxfp4":
        tile, scale = mxfp4_tile(codes, scales, expert, output, column, outputs, inputs)
    else:
        tl.static_assert(FORMAT == "dense")
        place = (expert * outputs + output).to(tl.int64)[:, None] * inputs + column[None, :]
        tile = tl.load(codes + place, mask=real, other=0.0)
        scale = tl.full(output.shape, 1.0, tl.float32)
    return tile, scale
