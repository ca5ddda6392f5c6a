"""Rows in FP8 for matmuls with weights in FP8, with the activation before them in the same kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.formats.codes import PORTABLE
from weft.kernels.cuda.formats.fp8 import code_of
from weft.kernels.cuda.formats.packed import STEP
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.formats.fp8 import CODES, LARGEST
from weft.kernels.formats.rounded import FP8_BLOCK, FP8_LEAST

# Rows of a program, and a number that torch's library wants rows and outputs to be a multiple of.
ROWS, HELD = 16, 16
MOST, LEAST, INVERSE = tl.constexpr(LARGEST), tl.constexpr(FP8_LEAST), tl.constexpr(1 / LARGEST)
INPUTS = tl.constexpr(FP8_BLOCK)


@dataclass(frozen=True, slots=True)
class LazyProduct:
    """An activation that is not computed yet, times `up` if there is one: a kernel that rounds rows computes it."""

    name: str
    gate: Float[Tensor, "rows size"]
    up: Float[Tensor, "rows size"] | None

    def computed(self) -> Float[Tensor, "rows size"]:
        return activate(self.name, self.gate, self.up)


def held_rows(rows: int) -> int:
    """Return the number of rows with which the library computes these."""
    return -(-rows // HELD) * HELD


def rows_in_fp8(
    x: Float[Tensor, "rows inputs"] | LazyProduct, by_column: bool = False
) -> tuple[Tensor, Float[Tensor, "held steps"]]:
    """Return the codes of rows, padded to whole tiles of inputs, and their scales. `in_fp8` is the definition.

    `by_column`: scales lie column by column, and rows of zeros follow, as the library needs them.
    """
    name, gate, up = (x.name, x.gate, x.up) if isinstance(x, LazyProduct) else ("", x, None)
    rows, inputs = gate.shape
    steps, held = -(-inputs // STEP), held_rows(rows) if by_column else rows
    codes = torch.empty(held, steps * STEP, dtype=CODES, device=gate.device)
    scales = torch.empty((steps, held) if by_column else (held, steps), dtype=torch.float32, device=gate.device)
    scales = scales.t() if by_column else scales
    round_kernel[(-(-held // ROWS), steps)](
        named(
            x=gate, x_stride=gate.stride(0), up=up, up_stride=0 if up is None else up.stride(0), rows=rows, held=held,
            codes=codes, scales=scales, row_stride=scales.stride(0), step_stride=scales.stride(1), inputs=inputs,
        ),
        NAME=name, PARTS=1 if up is None else 2, ROWS=ROWS, num_warps=4, **early(gate),
    )  # fmt: skip
    return codes, scales


@jit(do_not_specialize=["rows", "held"])
def round_kernel(
    x, x_stride, up, up_stride, rows, held, codes, scales, row_stride, step_stride, inputs,
    NAME: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (rows, 128 inputs)."""
    row, step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = step * INPUTS + tl.arange(0, INPUTS)
    is_held, steps, line = row < held, tl.num_programs(1), row.to(tl.int64)[:, None]
    real = (row < rows)[:, None] & (column < inputs)[None, :]
    wait(EARLY)
    value = tl.load(x + line * x_stride + column[None, :], mask=real, other=0.0).to(tl.float32)
    if NAME != "":
        other = value
        if PARTS == 2:
            other = tl.load(up + line * up_stride + column[None, :], mask=real, other=0.0).to(tl.float32)
        # Round where a separate kernel would.
        value = between(value, other, 0.0, 0.0, NAME, PARTS).to(x.dtype.element_ty).to(tl.float32)
        value = tl.where(real, value, 0.0)
    scale = tl.maximum(tl.max(tl.abs(value), 1), LEAST) * INVERSE
    # Exactly divided, as on a CPU: otherwise some codes would differ. What is no number stays so.
    divisor = tl.broadcast_to(scale[:, None], value.shape)
    if PORTABLE or x.dtype.element_ty != tl.bfloat16:
        code = tl.div_rn(value, divisor)
    else:
        # The same float32 for all bfloat16, in fewer instructions: what is left of a first quotient corrects it.
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None], value.shape)
        first = value * inverse
        code = tl.fma(tl.fma(-first, divisor, value), inverse, first)
        # Of an infinite scale nothing is right but that it is seen; inputs that do not exist are zeros all the same.
        code = tl.where(real, code, 0.0)
    code = tl.clamp(code, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    code = code_of(code) if PORTABLE else code.to(tl.float8e4nv)
    tl.store(codes + line * (steps * INPUTS) + column[None, :], code, mask=is_held[:, None])
    tl.store(scales + row.to(tl.int64) * row_stride + step.to(tl.int64) * step_stride, scale, mask=is_held)
