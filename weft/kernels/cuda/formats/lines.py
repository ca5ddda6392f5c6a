"""FP8 that tensor cores multiply as it is, with rows that are rounded to FP8 too (`--activations fp8`).

Both operands have a float32 for each 128 inputs, so that sum is one product of tensor cores, which both scales then
multiply. Codes lie line by line, padded with zeros to whole blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.formats.codes import PORTABLE
from weft.kernels.cuda.formats.fp8 import code_of
from weft.kernels.cuda.formats.packed import STEP, CodeTiles, pack
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.formats.fp8 import CODES, LARGEST, Fp8
from weft.kernels.formats.rounded import FP8, FP8_BLOCK, FP8_LEAST, RoundedRows, takes_fp8
from weft.kernels.formats.stored import Stored

# The first GPUs whose tensor cores multiply FP8.
CAPABILITY = (8, 9)
# Rows of a program that rounds them, and a number that the library wants rows and outputs to be a multiple of.
ROWS, HELD = 16, 16
MOST, LEAST, INVERSE = tl.constexpr(LARGEST), tl.constexpr(FP8_LEAST), tl.constexpr(1 / LARGEST)
INPUTS = tl.constexpr(FP8_BLOCK)
assert FP8_BLOCK == STEP, "a tile of inputs has one scale of its rows"


@dataclass(frozen=True, slots=True)
class CodeLines(CodeTiles):
    """FP8 for rows in FP8. Tensors: codes [outputs, whole tiles of inputs], then scales as those of `CodeTiles`.

    There is one of 128 inputs and `block_rows` outputs, or without `runs` one for each output.
    """

    @property
    def rows_in(self) -> str | None:
        return FP8

    @property
    def pairs(self) -> int:
        return 1

    def unpacked(self, stored: Stored) -> Stored:
        codes, scales = stored.tensors
        codes = codes[..., : stored.inputs]
        if self.runs:
            return replace(stored, format=Fp8(self.block_rows, STEP), tensors=(codes, scales))
        return replace(stored, format=Fp8(1, stored.inputs), tensors=(codes, scales.unsqueeze(-1)))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        rows = self.block_rows if self.runs else 1
        if start % rows:
            return None
        codes, scales = stored.tensors
        own = scales[..., start // rows : -(-end // rows), :] if self.runs else scales[..., start:end]
        return Stored(self, (codes[..., start:end, :], own), end - start, stored.inputs)


def prepared(stored: Stored, rounds: Set[str]) -> Stored:
    """Return a matrix, or those of experts, as kernels read it fastest with rows that are rounded so."""
    if FP8 not in rounds or not takes_fp8(stored):
        return pack(stored)
    return in_lines(stored) or RoundedRows.of(pack(stored), FP8)


def in_lines(stored: Stored) -> Stored | None:
    """Return FP8 as tensor cores read it; None if a tile has several scales, or the GPU does not multiply FP8."""
    form, (codes, scales) = stored.format, stored.tensors
    assert isinstance(form, Fp8)
    whole = form.block_columns >= stored.inputs
    if gpu_of(codes.device).capability < CAPABILITY or not (whole or form.block_columns % STEP == 0):
        return None
    steps = -(-stored.inputs // STEP)
    lines = codes if stored.inputs % STEP == 0 else padded(codes, steps * STEP)
    if whole and (form.block_rows == 1 or steps > 1):
        own = scales.squeeze(-1).repeat_interleave(form.block_rows, -1)[..., : stored.outputs]
        layout = CodeLines("e4m3 in lines 1")
    else:
        own = scales.repeat_interleave(max(1, form.block_columns // STEP), -1)[..., :steps]
        layout = CodeLines("e4m3 in lines 1", form.block_rows, 1)
    return replace(stored, format=layout, tensors=(lines.contiguous(), own.contiguous()))


def padded(codes: Tensor, columns: int) -> Tensor:
    found = torch.zeros(*codes.shape[:-1], columns, dtype=torch.uint8, device=codes.device)
    found[..., : codes.shape[-1]] = codes.view(torch.uint8)
    return found.view(CODES)


def held_rows(rows: int) -> int:
    """Return the number of rows with which the library computes these."""
    return -(-rows // HELD) * HELD


def rows_in_fp8(x: Float[Tensor, "rows inputs"], by_column: bool = False) -> tuple[Tensor, Float[Tensor, "held steps"]]:
    """Return the codes of rows, padded to whole tiles of inputs, and their scales. `in_fp8` is the definition.

    `by_column`: scales lie column by column, and rows of zeros follow, as the library needs them.
    """
    rows, inputs = x.shape
    steps, held = -(-inputs // STEP), held_rows(rows) if by_column else rows
    codes = torch.empty(held, steps * STEP, dtype=CODES, device=x.device)
    shape = (steps, held) if by_column else (held, steps)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if by_column else scales
    round_kernel[(-(-held // ROWS), steps)](
        named(
            x=x, x_stride=x.stride(0), rows=rows, held=held, codes=codes, scales=scales, row_stride=scales.stride(0),
            step_stride=scales.stride(1), inputs=inputs,
        ),
        ROWS=ROWS, num_warps=4, **early(x),
    )  # fmt: skip
    return codes, scales


@jit(do_not_specialize=["rows", "held"])
def round_kernel(
    x, x_stride, rows, held, codes, scales, row_stride, step_stride, inputs, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """Program (rows, 128 inputs)."""
    row, step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = step * INPUTS + tl.arange(0, INPUTS)
    is_row, is_held, steps = row < rows, row < held, tl.num_programs(1)
    wait(EARLY)
    place = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    value = tl.load(place, mask=is_row[:, None] & (column < inputs)[None, :], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), LEAST) * INVERSE
    # Exactly divided, as on a CPU: otherwise some codes would differ. What is no number stays so.
    code = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    code = tl.clamp(code, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    code = code_of(code) if PORTABLE else code.to(tl.float8e4nv)
    target = codes + row.to(tl.int64)[:, None] * (steps * INPUTS) + column[None, :]
    tl.store(target, code, mask=is_held[:, None])
    tl.store(scales + row.to(tl.int64) * row_stride + step.to(tl.int64) * step_stride, scale, mask=is_held)
