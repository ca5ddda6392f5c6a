"""Matmuls with packed weights, of any number of rows, and the activation after them, in one kernel.

Few rows are bound by reading the codes once, which takes many active programs: where there are few outputs, several
split the inputs, and the last to finish adds up their sums in order, or leaves that to the residual stream. Of many
rows, a program takes a tile, whose codes it decodes once, in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.formats.codes import STEP, TILE, form_of, most_rows, summed
from weft.kernels.cuda.formats.lines import CodeLines
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.cuda.formats.tiles import pointers
from weft.kernels.cuda.launch.gpus import H200
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, on_branch, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.linear.few import COUNTERS, counters
from weft.kernels.cuda.linear.rounding import rows_in_fp8
from weft.kernels.cuda.linear.tiles import place
from weft.kernels.formats.stored import Stored


class Division(NamedTuple):
    """Division of a matmul into programs."""

    rows: int  # of a program
    outputs: int
    shares: int  # programs that split the inputs of these
    warps: int
    stages: int
    rows_first: bool  # rows are the first operand of the matmul: decoded weights pass through shared memory


# Adjacent tiles of rows that are computed for the same outputs one after another, while the codes are in the cache.
ADJACENT = 8
# Programs that keep the memory busy with one row and with many, and the fewest tiles of inputs of a share.
PROGRAMS, MANY_PROGRAMS, LEAST_STEPS = 240, 120, 4
# Blocks of 64 outputs that occupy a GPU, so that inputs need not be split.
WIDE = 180
# Rows from which a matrix is decoded first and multiplied by torch's library, if it is wide and if it is not.
LIBRARY_ROWS, NARROW_LIBRARY_ROWS = 1024, 384
# Rows after which other kernels are launched.
LAST_ROWS = (8, 16, 32, 64, 128, NARROW_LIBRARY_ROWS - 1, LIBRARY_ROWS - 1)
# Bytes of partial sums beyond which rows are computed in parts.
MOST_PARTIAL = 64 << 20


def cut(rows: int, outputs: int, inputs: int) -> Division:
    """Return a division into programs.

    >>> cut(1, 4480, 15680), cut(40, 12288, 4096).rows
    (Division(rows=8, outputs=32, shares=4, warps=2, stages=4, rows_first=False), 64)
    >>> cut(30, 4480, 15680).shares, cut(30, 22656, 4480).outputs, cut(128, 4480, 15680).shares
    (4, 64, 3)
    """
    if rows <= 8:
        return Division(8, 32, shares_of(outputs, inputs), 2, 4, False)
    wide, steps = is_wide(outputs), -(-inputs // TILE_INPUTS)
    if rows <= 32:
        height = 16 if rows <= 16 else 32
        if wide:
            return Division(height, 64, 1, 4, 4, False)
        return Division(height, 128, doubled(-(-outputs // 128), steps, MANY_PROGRAMS), 4, 4, False)
    if wide or rows > 128:
        return Division(64 if rows <= 64 else 128, 64, 1, 4, 3, False)
    blocks = -(-outputs // 128) * -(-rows // 64)

    def length(shares: int) -> int:
        """Return how long it takes if a multiprocessor computes one program at a time."""
        return -(-blocks * shares // H200.multiprocessors) * -(-steps // shares)

    return Division(64, 128, min((1, 2, 3, 4), key=length), 8, 3, False)


def cut_lines(rows: int, outputs: int, inputs: int) -> Division:
    """Return a division of a matmul with rows in FP8, which are few where the library has their scales.

    >>> cut_lines(1, 4480, 15680)
    Division(rows=8, outputs=64, shares=4, warps=4, stages=5, rows_first=False)
    """
    if rows > 128:
        return Division(128, 64, 1, 4, 4, False)
    height = next((size for size in (8, 16, 32) if rows <= size), 64)
    return Division(height, 64, shares_of(outputs, inputs), 4, 5, False)


def is_wide(outputs: int) -> bool:
    return -(-outputs // 64) >= WIDE


def by_library(rows: int, outputs: int) -> bool:
    """Return whether it is faster to decode the matrix first.

    >>> by_library(1024, 22656), by_library(512, 22656), by_library(512, 4480)
    (True, False, True)
    """
    return rows >= (LIBRARY_ROWS if is_wide(outputs) else NARROW_LIBRARY_ROWS)


def exact_cut(rows: int, outputs: int, inputs: int) -> Division:
    """Return a division whose shares the weights alone decide, in tiles that tensor cores add up in the same order."""
    height = next((size for size in (16, 32, 64) if rows <= size), 128)
    return Division(height, 64, shares_of(outputs, inputs), 4, 3, False)


def shares_of(outputs: int, inputs: int) -> int:
    """Return the number of parts of the inputs: a power of two that leaves each part some tiles long.

    >>> shares_of(4480, 15680), shares_of(22656, 4480), shares_of(64, 4096), shares_of(64, 512)
    (4, 1, 8, 1)
    """
    return doubled(-(-outputs // 64), -(-inputs // TILE_INPUTS), PROGRAMS)


def doubled(blocks: int, steps: int, programs: int) -> int:
    shares = 1
    while blocks * shares < programs and steps >= 2 * LEAST_STEPS * shares:
        shares *= 2
    return shares


def multiply_packed(
    x: Float[Tensor, "rows inputs"],
    part: Stored,
    bias: Float[Tensor, " outputs"] | None = None,
    activation: str | None = None,
    parts: int = 1,
    summed: bool = True,
    fold: bool = False,
    by: Division | None = None,
    out: Float[Tensor, "rows results"] | None = None,
) -> Float[Tensor, "*shares rows results"]:
    """Return the matmul; with a named activation, activation(matmul) or, of two parts, activation(first) * second.

    Without `summed`, and if several programs share an output, return each program's float32 partial sum. `fold`:
    decode weights to the dtype of the rows, and add them up in one order whatever the number of rows. `out` is filled
    and returned.
    """
    form, (rows, inputs), outputs = form_of(part), x.shape, part.outputs
    assert form is not None
    results, has_codes = outputs // parts, isinstance(part.format, CodeLines)
    exact = fold or (x.dtype != torch.bfloat16 and not has_codes)
    by = by or (exact_cut if exact else cut_lines if has_codes else cut)(rows, outputs, inputs)
    by = by._replace(rows=min(by.rows, most_rows(part)))
    steps = -(-inputs // TILE_INPUTS)
    share = -(-steps // by.shares)
    shares = -(-steps // share)
    summed = summed or shares == 1
    y = out
    if summed and y is None:
        y = torch.empty(rows, results, dtype=x.dtype, device=x.device)
    tiles = -(-rows // by.rows) * -(-results // (by.outputs // parts))
    partial = 4 * shares * rows * outputs if shares > 1 else 0
    if y is not None and shares > 1 and rows > by.rows and (tiles > COUNTERS or partial > MOST_PARTIAL):
        # Every tile has a counter. Rows do not see each other.
        first = -(-rows // (2 * by.rows)) * by.rows
        for some, own in ((x[:first], y[:first]), (x[first:], y[first:])):
            multiply_packed(some, part, bias, activation, parts, fold=fold, by=by, out=own)
        return y
    found = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device) if partial else None
    values, factors = rows_in_fp8(x) if has_codes else (x, None)
    packed_kernel[(tiles, shares)](
        named(x=values, x_stride=values.stride(0), rows=rows, factors=factors), pointers(part),
        named(
            bias=bias, y=y, y_stride=0 if y is None else y.stride(0), found=found,
            come=counters(x.device, on_branch()), outputs=outputs, inputs=inputs, share=share,
        ),
        SHARES=shares, ROWS=by.rows, OUTPUTS=by.outputs, ROWS_FIRST=by.rows_first, FOLD=exact, **form,
        EVEN=inputs % TILE_INPUTS == 0, NAME=activation or "", PARTS=parts, ADJACENT=ADJACENT,
        num_warps=by.warps, num_stages=by.stages, **early(x),
    )  # fmt: skip
    result = y if summed else found
    assert result is not None
    return result


@jit(do_not_specialize=["rows"])
def packed_kernel(
    x, x_stride, rows, factors, codes, scales, more, bias, y, y_stride, found, come, outputs, inputs, share,
    SHARES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS_FIRST: tl.constexpr, FOLD: tl.constexpr,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr, EVEN: tl.constexpr,
    NAME: tl.constexpr, PARTS: tl.constexpr, ADJACENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    results, part = outputs // PARTS, tl.program_id(1)
    row_tile, block = place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(results, OUTPUTS // PARTS), ADJACENT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    output, is_output = lines_of(block, results, OUTPUTS, PARTS)
    is_row = row < rows
    first = part * share
    wait(EARLY)
    if factors is not None:
        factors += row.to(tl.int64) * tl.cdiv(inputs, STEP)
    total = summed(
        x + row.to(tl.int64) * x_stride, factors, is_row, codes, scales, more, output, inputs,
        first, tl.minimum(first + share, tl.cdiv(inputs, STEP)),
        FORMAT, PAIRS, BLOCK_ROWS, RUNS, FOLD, ROWS, OUTPUTS, ROWS_FIRST, EVEN,
    )  # fmt: skip
    real = is_output[:, None] & is_row[None, :]
    if bias is not None:
        # One of the parts includes the bias.
        added = tl.load(bias + output, mask=is_output & (part == 0), other=0.0).to(tl.float32)
        total += added[:, None]
    if SHARES > 1:
        spot = row.to(tl.int64)[None, :] * outputs + output[:, None]
        size = rows.to(tl.int64) * outputs
        tl.store(found + part * size + spot, total, mask=real)
        if y is not None:
            # All threads must store before the counter signals the others. The last program adds up.
            tl.debug_barrier()
            if tl.atomic_add(come + tl.program_id(0), 1, sem="acq_rel") < SHARES - 1:
                return
            total = tl.load(found + spot, mask=real, other=0.0, cache_modifier=".cg")
            for other in range(1, SHARES):
                total += tl.load(found + other * size + spot, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(come + tl.program_id(0), 0)
    if y is not None:
        target = y + row.to(tl.int64)[None, :] * y_stride
        if NAME == "":
            tl.store(target + output[:, None], total.to(y.dtype.element_ty), mask=real)
        else:
            # Round where a separate matmul would.
            total = total.to(y.dtype.element_ty).to(tl.float32)
            result = block * (OUTPUTS // PARTS) + tl.arange(0, OUTPUTS // PARTS)
            activated = between_parts(total, 0.0, 0.0, NAME, PARTS, OUTPUTS, ROWS).to(y.dtype.element_ty)
            tl.store(target + result[:, None], activated, mask=is_row[None, :] & (result < results)[:, None])


@triton.jit
def lines_of(block, results, OUTPUTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the lines of a block of outputs, and which are real: of two parts, the same 16 outputs of both alternate.

    Lines beyond the end are replaced by the last.
    """
    number = tl.arange(0, OUTPUTS)
    if PARTS == 2:
        output = block * (OUTPUTS // 2) + number // (2 * TILE) * TILE + number % TILE
        line = tl.minimum(output, results - 1) + number // TILE % 2 * results
    else:
        output = block * OUTPUTS + number
        line = tl.minimum(output, results - 1)
    return line, output < results


@triton.jit
def between_parts(
    total, alpha, limit, NAME: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the activation of the sums [outputs, rows] of a block."""
    if PARTS == 2:
        halves = tl.permute(tl.reshape(total, (OUTPUTS // (2 * TILE), 2, TILE, ROWS)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        gate, up = tl.reshape(gate, (OUTPUTS // 2, ROWS)), tl.reshape(up, (OUTPUTS // 2, ROWS))
    else:
        gate, up = total, total
    return between(gate, up, alpha, limit, NAME, PARTS)
