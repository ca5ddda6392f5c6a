"""Experts of the exact package for a token or two, in two kernels: the second includes the shared expert and the sum.

Every pair is computed by itself, with one sum over the inputs in their order, as in `moe_some`. The first kernel also
prepares the shared expert's row, so that the second multiplies all summands of a token alike. The last program of a
token's outputs adds up what the others stored, in the order of `moe_sum`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.gpus import H200, Gpu, gpu_of
from weft.kernels.cuda.launch.launching import Arguments, jit, named
from weft.kernels.cuda.launch.overlap import early, on_branch, wait
from weft.kernels.cuda.linear.between import between, sigmoid
from weft.kernels.cuda.moe.choices import Tiles
from weft.kernels.cuda.moe.some import accumulate, products
from weft.kernels.experts import ExpertWeights, SharedExpert

# Tiles of the first matmul, if these make enough programs or not, and of the second. Measured on an H200; no tile
# changes a bit. A tensor core multiplies several rows at least; all but one are zero.
FIRST, NARROW_FIRST, SECOND = (
    Tiles(16, 64, 64, 4, 4, True),
    Tiles(16, 32, 256, 4, 3, False),
    Tiles(16, 64, 64, 4, 6, True),
)
# More blocks of outputs of a step's tokens than there can be.
COUNTERS = 1 << 16


def few_experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens k"],
    chosen: Float[Tensor, "tokens k"],
    layer: ExpertWeights,
    shared: SharedExpert | None,
    by: tuple[Tiles, Tiles] | None = None,
) -> Float[Tensor, "tokens hidden"]:
    (tokens, k), kind, hidden, inner = chosen.shape, layer.activation, layer.second.outputs, layer.second.inputs
    first, second = by or tiles_for(tokens * k, inner, gpu_of(x.device))
    summands, shared_inner = (k, 0) if shared is None else (k + 1, shared.gate.shape[1])
    width, blocks = max(inner, shared_inner), -(-hidden // second.outputs)
    assert tokens * blocks <= COUNTERS
    inputs = torch.empty(tokens * summands, width, dtype=x.dtype, device=x.device)
    found = torch.empty(tokens * summands, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    common = {"K": k, "SUMMANDS": summands, "HIDDEN": hidden, "INNER": inner, "SHARED": shared_inner, "WIDTH": width}
    few_inputs_kernel[(-(-width // first.outputs), tokens * summands)](
        named(
            x=x, chosen=chosen, first=layer.first.dense, bias=layer.first_bias, inputs=inputs, alpha=kind.alpha,
            limit=kind.limit,
        ),
        shared_inputs(shared), **common, NAME=kind.name, PARTS=kind.parts, **sizes_of(first), **early(x),
    )  # fmt: skip
    few_sums_kernel[(blocks, tokens * summands)](
        named(
            inputs=inputs, weights=weights, chosen=chosen, second=layer.second.dense, bias=layer.second_bias,
            found=found, come=counters(x.device, on_branch()), out=out,
        ),
        shared_second(shared), **common, **sizes_of(second), **early(x),
    )  # fmt: skip
    return out


def tiles_for(pairs: int, inner: int, gpu: Gpu = H200) -> tuple[Tiles, Tiles]:
    """Return the tiles of both matmuls.

    >>> tiles_for(8, 512)[0].outputs, tiles_for(4, 2880)[0].outputs
    (32, 64)
    """
    programs = pairs * -(-inner // FIRST.outputs)
    return FIRST if programs >= gpu.multiprocessors else NARROW_FIRST, SECOND


def sizes_of(tiles: Tiles) -> dict[str, int | bool]:
    return {
        "ROWS": tiles.pairs, "BLOCK": tiles.outputs, "STEP": tiles.inputs, "WEIGHTS_FIRST": tiles.weights_first,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def shared_inputs(shared: SharedExpert | None) -> Arguments:
    if shared is None:
        return NO_INPUTS
    assert shared.gate.stride(1) == shared.up.stride(1) == 1
    return named(
        shared_gate=shared.gate, gate_stride=shared.gate.stride(0), shared_up=shared.up, up_stride=shared.up.stride(0)
    )


def shared_second(shared: SharedExpert | None) -> Arguments:
    if shared is None:
        return NO_SECOND
    opening, second = shared.opening, shared.second
    assert second.matrix is not None
    assert second.matrix.stride(1) == 1
    return named(
        shared_matrix=second.matrix, matrix_stride=second.matrix.stride(0), shared_bias=second.bias, opening=opening,
        opening_stride=0 if opening is None else opening.stride(0),
    )  # fmt: skip


NO_INPUTS = named(shared_gate=None, gate_stride=0, shared_up=None, up_stride=0)
NO_SECOND = named(shared_matrix=None, matrix_stride=0, shared_bias=None, opening=None, opening_stride=0)


@lru_cache
def counters(device: torch.device, branch: bool = False) -> Tensor:
    """Return the counters of finished programs per block of a token's outputs. Every launch leaves them at zero."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@jit
def few_inputs_kernel(
    x, chosen, first, bias, inputs, alpha, limit, shared_gate, gate_stride, shared_up, up_stride,
    K: tl.constexpr, SUMMANDS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    WIDTH: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, summand of a token): the input of the second matmul, for one choice or the shared."""
    wait(EARLY)
    slot = tl.program_id(1).to(tl.int64)
    token, choice = slot // SUMMANDS, slot % SUMMANDS
    dtype: tl.constexpr = inputs.dtype.element_ty
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = inputs + slot * WIDTH + output
    if SHARED > 0:  # noqa: SIM102  # a constant
        if choice == K:
            gate = tl.load(shared_gate + token * gate_stride + output, mask=output < SHARED, other=0.0).to(tl.float32)
            up = tl.load(shared_up + token * up_stride + output, mask=output < SHARED, other=0.0).to(tl.float32)
            tl.store(target, between(gate, up, 0.0, 0.0, "silu", 2).to(dtype), mask=output < SHARED)
            return
    real = output < INNER
    expert = tl.load(chosen + token * K + choice).to(tl.int64)
    matrix = first + expert * (PARTS * INNER * HIDDEN) + output[:, None] * HIDDEN
    row = tl.arange(0, ROWS)
    rows = x + token * HIDDEN + tl.zeros([ROWS, 1], tl.int32)
    gate, up = products(rows, row == 0, matrix, real, INNER, HIDDEN, PARTS, ROWS, BLOCK, STEP, WEIGHTS_FIRST)
    # Round where a matmul that is stored is rounded.
    gate, up = the_first(gate, ROWS).to(dtype).to(tl.float32), the_first(up, ROWS).to(dtype).to(tl.float32)
    if bias is not None:
        biases = bias + expert * (PARTS * INNER) + output
        gate += tl.load(biases, mask=real, other=0.0).to(tl.float32)
        if PARTS == 2:
            up += tl.load(biases + INNER, mask=real, other=0.0).to(tl.float32)
    tl.store(target, between(gate, up, alpha, limit, NAME, PARTS).to(dtype), mask=real)


@jit
def few_sums_kernel(
    inputs, weights, chosen, second, bias, found, come, out,
    shared_matrix, matrix_stride, shared_bias, opening, opening_stride,
    K: tl.constexpr, SUMMANDS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, summand of a token): multiply for one choice, or for the shared expert."""
    block, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, choice = slot // SUMMANDS, slot % SUMMANDS
    dtype: tl.constexpr = out.dtype.element_ty
    output = block * BLOCK + tl.arange(0, BLOCK)
    real = output < HIDDEN
    # Choices are older than the previous kernel: all its programs had waited for them before this one could start.
    expert = tl.load(chosen + token * K + tl.minimum(choice, K - 1)).to(tl.int64)
    matrix, stride, size = second + expert * (HIDDEN * INNER), INNER, INNER
    if SHARED > 0:  # noqa: SIM102  # a constant
        if choice == K:
            matrix, stride, size = shared_matrix, matrix_stride, SHARED
    wait(EARLY)
    total = product_of_row(
        inputs + slot * WIDTH, matrix + output[:, None].to(tl.int64) * stride, real, size,
        ROWS, BLOCK, STEP, WEIGHTS_FIRST,
    )  # fmt: skip
    if SHARED > 0 and shared_bias is not None:
        total += tl.load(shared_bias + output, mask=real & (choice == K), other=0.0).to(tl.float32)
    tl.store(found + slot * HIDDEN + output, total.to(dtype), mask=real)
    # All threads must store before the counter signals the others.
    tl.debug_barrier()
    counter = come + token * tl.num_programs(0) + block
    if tl.atomic_add(counter, 1, sem="acq_rel") < SUMMANDS - 1:
        return
    tl.store(counter, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        one = found + (token * SUMMANDS + j) * HIDDEN + output
        value = tl.load(one, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
        if bias is not None:
            expert = tl.load(chosen + pair).to(tl.int64)
            value += tl.load(bias + expert * HIDDEN + output, mask=real, other=0.0).to(tl.float32)
        total += tl.load(weights + pair).to(tl.float32) * value
    if SHARED > 0:
        last = found + (token * SUMMANDS + K) * HIDDEN + output
        value = tl.load(last, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
        if opening is not None:
            value = value * sigmoid(tl.load(opening + token * opening_stride).to(tl.float32))
        total += value
    tl.store(out + token * HIDDEN + output, total.to(dtype), mask=real)


@triton.jit
def product_of_row(
    row, matrix, real_output, size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the matmul of one row with lines of a matrix. Float32."""
    is_first = (tl.arange(0, ROWS) == 0)[:, None]
    rows = row + tl.zeros([ROWS, 1], tl.int32)
    total = tl.zeros([BLOCK if WEIGHTS_FIRST else ROWS, ROWS if WEIGHTS_FIRST else BLOCK], tl.float32)
    for begin in range(0, size, STEP):
        column = begin + tl.arange(0, STEP)
        real = (column < size)[None, :]
        block = tl.load(matrix + column[None, :], mask=real_output[:, None] & real, other=0.0)
        value = tl.load(rows + column[None, :], mask=is_first & real, other=0.0)
        total = accumulate(total, value, block, WEIGHTS_FIRST)
    return the_first(tl.trans(total) if WEIGHTS_FIRST else total, ROWS)


@triton.jit
def the_first(rows, ROWS: tl.constexpr):
    """Return the first of some rows."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == 0)[:, None], rows, 0.0), 0)
