"""Matmul of some dozens of rows with weights, and the activation after it, in one kernel; or in parts for the stream.

A library's matmul would write what the activation reads again, and could not start before the previous kernel has
ended. The hardware's copy unit loads tiles of weights and rows (tensor descriptors, from Hopper on).
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, is_able, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.linear.few import share_of

# Measured on an H200: rows and outputs for which whole steps are faster than with the library. A program takes this
# number of outputs, and most multiprocessors run one program.
ROWS = range(33, 129)
WIDTH = 128
LEAST_PROGRAMS = 100
# Inputs that a program multiplies at a time, and the number of such steps that it prefetches.
INPUTS = 64
STAGES = 5
# The same for sums that are left in parts, where a program also takes a share of the inputs.
PARTED_ROWS = range(65, 129)
PARTED_WIDTH, SHARES, PARTED_STAGES = 64, 2, 8
# Alignment of addresses and lines that a descriptor needs, in bytes.
ALIGNMENT = 16


def are_some(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether `some_rows` is faster. Needs nothing from the device."""
    return len(x) in ROWS and fills(x, -(-len(weight) // WIDTH)) and can_copy(x, weight)


def are_parted(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether `rows_in_parts` is faster. Needs nothing from the device."""
    return len(x) in PARTED_ROWS and fills(x, -(-len(weight) // PARTED_WIDTH) * SHARES) and can_copy(x, weight)


def fills(x: Tensor, programs: int) -> bool:
    """Return whether most multiprocessors run one program, and none runs two."""
    return LEAST_PROGRAMS <= programs <= gpu_of(x.device).multiprocessors


def can_copy(x: Tensor, weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Return whether the hardware's copy unit can load tiles of both."""
    half = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    able = is_able(x.device) and gpu_of(x.device).is_roomy
    return half and x.ndim == 2 and able and can_describe(x, weight)


def can_describe(*matrices: Float[Tensor, "rows columns"]) -> bool:
    return all(
        matrix.stride(1) == 1
        and matrix.stride(0) * matrix.element_size() % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
        for matrix in matrices
    )


def some_rows(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    activation: str,
    parts: int,
) -> Float[Tensor, "rows results"]:
    """Return the activation, by name, of the matmul; of two parts side by side, activation(first) * second."""
    (rows, inputs), results, width = x.shape, len(weight) // parts, WIDTH // parts
    assert rows < ROWS.stop, rows
    y = torch.empty(rows, results, dtype=x.dtype, device=x.device)
    compiled = 64 if rows <= 64 else 128
    some_rows_kernel[(-(-results // width),)](
        named(
            x=TensorDescriptor.from_tensor(x, [compiled, INPUTS]),
            weight=TensorDescriptor.from_tensor(weight, [width, INPUTS]),
            bias=bias, y=y, rows=rows, results=results, inputs=inputs,
        ),
        ROWS=compiled, OUTPUTS=width, INPUTS=INPUTS, NAME=activation, PARTS=parts,
        num_warps=4, num_stages=STAGES, **early(x),
    )  # fmt: skip
    return y


@jit(remember=False, do_not_specialize=["rows"])
def some_rows_kernel(
    x, weight, bias, y, rows, results, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    NAME: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OUTPUTS
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    wait(EARLY)
    for column in range(0, inputs, INPUTS):
        # Values outside are zero.
        gates = weight.load([first, column])
        values = x.load([0, column])
        gate = tl.dot(values, gates.T, gate)
        if PARTS == 2:
            up = tl.dot(values, weight.load([results + first, column]).T, up)
    row, output = tl.arange(0, ROWS), first + tl.arange(0, OUTPUTS)
    is_output = output < results
    if bias is not None:
        gate += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            up += tl.load(bias + results + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = y.dtype.element_ty
    # Round where a separate matmul would.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = between(gate, up, 0.0, 0.0, NAME, PARTS).to(dtype)
    tl.store(y + row[:, None] * results + output[None, :], activated, mask=(row < rows)[:, None] & is_output[None, :])


def rows_in_parts(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "shares rows outputs"]:
    """Return the matmul as float32 parts that are still to be added up."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert rows < PARTED_ROWS.stop, rows
    found = torch.empty(SHARES, rows, outputs, dtype=torch.float32, device=x.device)
    compiled = PARTED_ROWS.stop - 1
    parts_kernel[(-(-outputs // PARTED_WIDTH), SHARES)](
        named(
            x=TensorDescriptor.from_tensor(x, [compiled, INPUTS]),
            weight=TensorDescriptor.from_tensor(weight, [PARTED_WIDTH, INPUTS]),
            bias=bias, found=found, rows=rows, outputs=outputs, inputs=inputs, share=share_of(inputs, SHARES, INPUTS),
        ),
        ROWS=compiled, OUTPUTS=PARTED_WIDTH, INPUTS=INPUTS, num_warps=4, num_stages=PARTED_STAGES, **early(x),
    )  # fmt: skip
    return found


@jit(remember=False, do_not_specialize=["rows"])
def parts_kernel(
    x, weight, bias, found, rows, outputs, inputs, share,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first, part = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    wait(EARLY)
    for column in range(part * share, tl.minimum(inputs, (part + 1) * share), INPUTS):
        # Values outside are zero.
        total = tl.dot(x.load([0, column]), weight.load([first, column]).T, total)
    row, output = tl.arange(0, ROWS), first + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    if bias is not None:
        total += tl.load(bias + output, mask=is_output & (part == 0), other=0.0).to(tl.float32)[None, :]
    at = found + part.to(tl.int64) * rows * outputs + row[:, None] * outputs + output[None, :]
    tl.store(at, total, mask=(row < rows)[:, None] & is_output[None, :])
