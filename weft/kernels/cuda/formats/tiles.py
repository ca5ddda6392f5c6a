"""The place where kernels read weights of any format: a tile of outputs and inputs, and the scales of its outputs.

A tile lies in one block of inputs, so that one scale for each output multiplies its whole sum. Codes are exact in 16
bits: tensor cores multiply them, and the scale is applied to the sum in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.formats.blocks import BLOCK_STEP, block_kind, block_tile
from weft.kernels.cuda.formats.fp8 import fp8_form, fp8_tile
from weft.kernels.cuda.formats.groups import grouped_tile, step_of
from weft.kernels.cuda.formats.mxfp4 import mxfp4_tile
from weft.kernels.cuda.formats.nvfp4 import nvfp4_tile
from weft.kernels.cuda.launch.launching import Arguments, named
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import BLOCK, Mxfp4
from weft.kernels.formats.nvfp4 import BLOCK as SHORT_BLOCK
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import DENSE, Stored

# Inputs of a tile where a format does not need fewer, and the fewest that tensor cores multiply.
STEP, LEAST_STEP = 128, 16


class TileForm(NamedTuple):
    """What a kernel must know of a format when it is compiled."""

    format: str
    block_rows: int = 1  # of GGUF's blocks: bytes
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
    elif isinstance(stored.format, Grouped):
        step = step_of(stored.format, stored.inputs, STEP)
        found = TileForm(f"int{stored.format.bits}", 1, stored.format.group, step)
    elif isinstance(stored.format, Nvfp4):
        found = TileForm("nvfp4", step=SHORT_BLOCK)
    elif isinstance(stored.format, BlockFormat):
        found = TileForm(block_kind(stored.format), stored.format.bytes, stored.format.numbers, BLOCK_STEP)
    return found if found is not None and found.step >= LEAST_STEP else None


def pointers(stored: Stored) -> Arguments:
    """Return the tensors of a matrix as arguments of a kernel."""
    codes, *others = stored.tensors
    scales: Tensor | None = others[0] if others else None
    more: Tensor | None = others[1] if len(others) > 1 else None
    assert all(each.is_contiguous() for each in stored.tensors)
    return named(codes=codes, scales=scales, more=more)


@triton.jit
def load_tile(
    codes, scales, more, expert, output, column, outputs, inputs,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile [outputs, inputs] of an expert's codes, and the scales of its outputs; zeros beyond the matrix.

    `more`: the third tensor of a format that has one.
    """
    real = (output < outputs)[:, None] & (column < inputs)[None, :]
    if FORMAT == "fp8":
        tile, scale = fp8_tile(codes, scales, expert, output, column, outputs, inputs, real, BLOCK_ROWS, BLOCK_COLUMNS)
    elif FORMAT == "mxfp4":
        tile, scale = mxfp4_tile(codes, scales, expert, output, column, outputs, inputs)
    elif FORMAT == "int4":
        tile, scale = grouped_tile(codes, scales, more, expert, output, column, outputs, inputs, 4, BLOCK_COLUMNS)
    elif FORMAT == "int8":
        tile, scale = grouped_tile(codes, scales, more, expert, output, column, outputs, inputs, 8, BLOCK_COLUMNS)
    elif FORMAT == "nvfp4":
        tile, scale = nvfp4_tile(codes, scales, more, expert, output, column, outputs, inputs)
    elif FORMAT == "dense":
        place = (expert * outputs + output).to(tl.int64)[:, None] * inputs + column[None, :]
        tile = tl.load(codes + place, mask=real, other=0.0)
        scale = tl.full(output.shape, 1.0, tl.float32)
    else:
        # The bytes and the numbers of a block.
        tile, scale = block_tile(codes, expert, output, column, outputs, inputs, FORMAT, BLOCK_ROWS, BLOCK_COLUMNS)
    return tile, scale
