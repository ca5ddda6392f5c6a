"""Matmul of few rows with weights: bound by reading the weights once, which takes many active programs.

Where a layer has too few outputs to occupy the GPU, several programs split its inputs; the last to finish adds up
all partial sums, always in the same order, or leaves that to the next kernel that reads them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.gpus import H200, Gpu, gpu_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, let_next_start, on_branch, wait
from weft.kernels.cuda.linear.between import between

# Measured on an H200: up to this number of rows these kernels are faster than the library.
MOST_ROWS = 32
OUTPUTS = 64
INPUTS = 128
# Programs that keep the memory busy, by maximum number of rows.
PROGRAMS = {16: 128, 32: 88}
# From this number of outputs, with more than 16 rows, programs take twice as many outputs, so they read the inputs half
# as often; there are still about as many programs as multiprocessors.
WIDE, LEAST_WIDE = 128, 100 * 128
# More blocks of outputs than any layer has.
COUNTERS = 1 << 16


class Cut(NamedTuple):
    """Division of a matmul into programs."""

    width: int  # outputs per program
    shares: int  # programs that split the inputs of these
    inputs: int  # multiplied at a time by a program
    warps: int
    stages: int
    # Lines of weights in a tile, if more than `width`; those beyond are zeros. So a width that is no power of two may
    # divide a layer evenly.
    lines: int | None = None
    # Whether the next kernel starts at the end of the sum, and not at its beginning.
    late: bool = False


def cut(rows: int, outputs: int, inputs: int, gpu: Gpu = H200) -> Cut:
    r"""Return the fastest division measured in whole steps; matmuls timed alone would favour others.

    >>> print(cut(2, 8728, 3072), cut(2, 24576, 3072), sep="\n")
    Cut(width=64, shares=1, inputs=128, warps=4, stages=4, lines=None, late=False)
    Cut(width=64, shares=1, inputs=128, warps=4, stages=3, lines=None, late=False)
    >>> print(cut(32, 3072, 12288), cut(32, 8728, 3072), cut(32, 15680, 4480), sep="\n")
    Cut(width=64, shares=2, inputs=128, warps=4, stages=5, lines=None, late=False)
    Cut(width=64, shares=1, inputs=64, warps=4, stages=5, lines=None, late=False)
    Cut(width=128, shares=1, inputs=128, warps=8, stages=4, lines=None, late=False)
    """
    if is_wide(rows, outputs, gpu):
        return Cut(2 * OUTPUTS, 1, INPUTS, 8, 4)
    compiled, blocks = rows_compiled(rows), -(-outputs // OUTPUTS)
    shares = shares_of(blocks, inputs, PROGRAMS[compiled])
    programs = blocks * shares
    if not gpu.is_roomy:
        return Cut(OUTPUTS, shares, INPUTS // 2, 4, 3)
    if compiled == 16:
        # Fewer programs have to prefetch further ahead.
        return Cut(OUTPUTS, shares, INPUTS, 4, 4 if programs <= 256 else 3)
    # One program per multiprocessor, or three with half the shared memory.
    return Cut(OUTPUTS, shares, INPUTS if programs <= gpu.multiprocessors else INPUTS // 2, 4, 5)


def is_wide(rows: int, outputs: int, gpu: Gpu) -> bool:
    return gpu.is_roomy and rows_compiled(rows) > 16 and LEAST_WIDE <= outputs <= gpu.multiprocessors * WIDE


def are_few(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether these kernels support the operands."""
    half = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    few = x.ndim == 2 and 0 < len(x) <= MOST_ROWS
    return half and few and x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] % 16 == 0


def few_rows(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    activation: str | None = None,
    parts: int = 1,
    summed: bool = True,
    by: Cut | None = None,
) -> Float[Tensor, "*shares rows results"]:
    """Return the matmul; with a named activation, activation(matmul) or, of two parts, activation(first) * second.

    Without `summed`, and if several programs share an output, return each program's float32 partial sum. `by`
    overrides the usual cut.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    results = outputs // parts
    width, shares, step, warps, stages, lines, late = by or cut(rows, outputs, inputs, gpu_of(x.device))
    blocks = -(-results // (width // parts))
    share = share_of(inputs, shares, step)
    summed = summed or shares == 1
    found = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device) if shares > 1 else None
    y = torch.empty(rows, results, dtype=x.dtype, device=x.device) if summed else None
    few_rows_kernel[(blocks, shares)](
        named(
            x=x, weight=weight, bias=bias, y=y, found=found, come=counters(x.device, on_branch()), rows=rows,
            outputs=outputs, inputs=inputs, share=share, x_stride=x.stride(0),
        ),
        ROWS=rows_compiled(rows), OUTPUTS=lines or width, WIDTH=width, INPUTS=step, SHARES=shares,
        EVEN=inputs == shares * share or (shares == 1 and inputs % step == 0),
        NAME=activation or "", PARTS=parts, LATE=late, num_warps=warps, num_stages=stages, **early(x),
    )  # fmt: skip
    result = y if summed else found
    assert result is not None
    return result


def rows_compiled(rows: int) -> int:
    """Return the number of rows that a kernel is compiled for.

    >>> rows_compiled(2), rows_compiled(17)
    (16, 32)
    """
    return 16 if rows <= 16 else 32


def shares_of(blocks: int, inputs: int, programs: int) -> int:
    """Return the number of parts of the inputs: a power of two that leaves each part some steps long.

    >>> shares_of(32, 2048, 128), shares_of(32, 8192, 128), shares_of(70, 15680, 128), shares_of(256, 2048, 128)
    (4, 4, 2, 1)
    """
    shares = 1
    while blocks * shares < programs and inputs >= 4 * INPUTS * shares:
        shares *= 2
    return shares


def share_of(inputs: int, shares: int, step: int = INPUTS) -> int:
    """Return the inputs of a share but the last, which may be shorter. Steps of up to INPUTS give the same shares.

    >>> share_of(8192, 4), share_of(2880, 4, step=64), share_of(2880, 1, step=1024)
    (2048, 768, 3072)
    """
    step = max(step, INPUTS)
    return -(-inputs // (shares * step)) * step


@lru_cache
def counters(device: torch.device, branch: bool = False) -> Tensor:
    """Return the counters of finished programs per block of outputs. Every launch leaves them at zero.

    A matmul on a branch may run at the same time as another one, so it has its own.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@jit
def few_rows_kernel(
    x, weight, bias, y, found, come, rows, outputs, inputs, share, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, SHARES: tl.constexpr,
    EVEN: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    # Of two parts a program takes the same outputs, interleaved: each gate lies beside its gated value.
    results = outputs // PARTS
    number = tl.arange(0, OUTPUTS)
    output = block * (WIDTH // PARTS) + number // PARTS
    row = tl.arange(0, ROWS)
    is_output, is_row = (output < results) & (number < WIDTH), row < rows
    output += number % PARTS * results
    end = tl.minimum(inputs, (part + 1) * share)
    total = summed_products(
        x, weight, output, is_output, row, is_row, part * share, end, inputs, x_stride,
        ROWS, OUTPUTS, INPUTS, EVEN, EARLY, LATE,
    )  # fmt: skip
    place = row[None, :] * outputs + output[:, None]
    real = is_row[None, :] & is_output[:, None]
    if SHARES > 1:
        if y is None and bias is not None:
            # No program finishes these: one of the parts includes the bias.
            total += tl.load(bias + output, mask=is_output & (part == 0), other=0.0).to(tl.float32)[:, None]
        tl.store(found + part * rows * outputs + place, total, mask=real)
        if y is not None:
            # All threads must store before the counter signals the others.
            tl.debug_barrier()
            if tl.atomic_add(come + block, 1, sem="acq_rel") < SHARES - 1:
                return
            total = tl.load(found + place, mask=real, other=0.0, cache_modifier=".cg")
            for other in range(1, SHARES):
                total += tl.load(found + other * rows * outputs + place, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(come + block, 0)
    if y is not None:
        finish(total, bias, y, row, rows, output, is_output, outputs, block, NAME, PARTS, OUTPUTS, WIDTH, ROWS)


@triton.jit
def summed_products(
    x, weight, output, is_output, row, is_row, begin, end, inputs, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    LATE: tl.constexpr = False,
):  # fmt: skip
    """Return the dot product of each output with each row, over inputs `begin` to `end`. Wait for earlier kernels."""
    column = tl.arange(0, INPUTS)
    weights = weight + output[:, None].to(tl.int64) * inputs + column[None, :]
    values = x + row[None, :] * x_stride + column[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    # Weights are older than any step and could be loaded before the wait, but only outside of the loop, whose own loads
    # would then begin after the first product: slower on an H200.
    wait(EARLY, not LATE)
    for first in range(begin, end, INPUTS):
        is_input = first + column < end
        seen = is_output[:, None] if EVEN else is_output[:, None] & is_input[None, :]
        there = is_row[None, :] if EVEN else is_row[None, :] & is_input[:, None]
        # Weights are read once, values by every program: the cache should keep the values. (Triton 3.7 forgets that
        # policy where it loads asynchronously.)
        w = tl.load(weights + first, mask=seen, other=0.0, eviction_policy="evict_first")
        total = tl.dot(w, tl.load(values + first, mask=there, other=0.0), total)
    if LATE:
        let_next_start(EARLY)
    return total


@triton.jit
def finish(
    total, bias, y, row, rows, output, is_output, outputs, block,
    NAME: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply bias and activation to a block of outputs whose sums are complete."""
    results = outputs // PARTS
    is_row = row < rows
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if NAME == "":
        place = row[None, :] * outputs + output[:, None]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
    else:
        # Round where a separate matmul would.
        total = total.to(y.dtype.element_ty).to(tl.float32)
        if PARTS == 2:
            gate, up = tl.split(tl.permute(tl.reshape(total, (OUTPUTS // 2, 2, ROWS)), (0, 2, 1)))
        else:
            gate, up = total, total
        number = tl.arange(0, OUTPUTS // PARTS)
        result = block * (WIDTH // PARTS) + number
        activated = between(gate, up, 0.0, 0.0, NAME, PARTS).to(y.dtype.element_ty)
        real = is_row[None, :] & ((result < results) & (number < WIDTH // PARTS))[:, None]
        tl.store(y + row[None, :] * results + result[:, None], activated, mask=real)
