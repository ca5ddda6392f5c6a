"""Experts of the exact package for a token or two, in two kernels: the second includes the shared expert and the sum.

Every pair is computed by itself, as in `moe_some`, with one sum over the inputs in their order. The last program of a
token's outputs adds up what the others stored, in the order of `moe_sum`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launching import Arguments, jit, named
from weft.kernels.cuda.moe_activation import sigmoid
from weft.kernels.cuda.moe_choices import Tiles
from weft.kernels.cuda.moe_some import multiply
from weft.kernels.cuda.overlap import early, on_branch, wait
from weft.kernels.experts import ExpertWeights, SharedExpert

# Tiles of pairs that are computed alone. A tensor core multiplies 16 rows at least.
ALONE = Tiles(16, 32, 256, 4, 3, False)
# More blocks of outputs of a step's tokens than there can be.
COUNTERS = 1 << 16


def few_experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens k"],
    chosen: Float[Tensor, "tokens k"],
    layer: ExpertWeights,
    shared: SharedExpert | None,
) -> Float[Tensor, "tokens hidden"]:
    (tokens, k), (_, hidden, inner), kind = chosen.shape, layer.second.shape, layer.activation
    between_them = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    multiply(
        x, k, chosen, None, layer.first, layer.first_bias, between_them, ALONE,
        kind.name, kind.parts, (kind.alpha, kind.limit), rounded=True,
    )  # fmt: skip
    summands = k if shared is None else k + 1
    blocks = -(-hidden // ALONE.outputs)
    assert tokens * blocks <= COUNTERS
    found = torch.empty(tokens * summands, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    few_sums_kernel[(blocks, tokens * summands)](
        named(
            inputs=between_them, weights=weights, chosen=chosen, second=layer.second, bias=layer.second_bias,
            found=found, come=counters(x.device, on_branch()), out=out,
        ),
        shared_expert(shared),
        K=k, SUMMANDS=summands, HIDDEN=hidden, INNER=inner, SHARED=0 if shared is None else shared.gate.shape[1],
        PAIRS=ALONE.pairs, BLOCK=ALONE.outputs, STEP=ALONE.inputs,
        num_warps=ALONE.warps, num_stages=ALONE.stages, **early(x),
    )  # fmt: skip
    return out


def shared_expert(shared: SharedExpert | None) -> Arguments:
    if shared is None:
        return NOT_SHARED
    opening, second = shared.opening, shared.second
    assert shared.gate.stride(1) == shared.up.stride(1) == second.matrix.stride(1) == 1
    return named(
        shared_gate=shared.gate, gate_stride=shared.gate.stride(0), shared_up=shared.up, up_stride=shared.up.stride(0),
        shared_second=second.matrix, second_stride=second.matrix.stride(0), shared_bias=second.bias, opening=opening,
        opening_stride=0 if opening is None else opening.stride(0),
    )  # fmt: skip


NOT_SHARED = named(
    shared_gate=None, gate_stride=0, shared_up=None, up_stride=0, shared_second=None, second_stride=0, shared_bias=None,
    opening=None, opening_stride=0,
)  # fmt: skip


@lru_cache
def counters(device: torch.device, branch: bool = False) -> Tensor:
    """Return the counters of finished programs per block of a token's outputs. Every launch leaves them at zero."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@jit
def few_sums_kernel(
    inputs, weights, chosen, second, bias, found, come, out,
    shared_gate, gate_stride, shared_up, up_stride, shared_second, second_stride, shared_bias, opening, opening_stride,
    K: tl.constexpr, SUMMANDS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, summand of a token): multiply for one choice, or for the shared expert."""
    wait(EARLY)
    block, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, choice = slot // SUMMANDS, slot % SUMMANDS
    dtype: tl.constexpr = out.dtype.element_ty
    output = block * BLOCK + tl.arange(0, BLOCK)
    real = output < HIDDEN
    if choice < K:
        pair = token * K + choice
        expert = tl.load(chosen + pair).to(tl.int64)
        matrix = second + expert * (HIDDEN * INNER) + output[:, None] * INNER
        value = product_of_row(inputs + pair * INNER, None, matrix, real, INNER, PAIRS, BLOCK, STEP).to(dtype)
    else:
        if SHARED > 0:
            gate, up = shared_gate + token * gate_stride, shared_up + token * up_stride
            matrix = shared_second + output[:, None].to(tl.int64) * second_stride
            total = product_of_row(gate, up, matrix, real, SHARED, PAIRS, BLOCK, STEP)
            if shared_bias is not None:
                total += tl.load(shared_bias + output, mask=real, other=0.0).to(tl.float32)
            value = total.to(dtype)
        else:
            value = tl.zeros([BLOCK], dtype)
    tl.store(found + slot * HIDDEN + output, value, mask=real)
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
    row, factor, matrix, real_output, SIZE: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Return the matmul of one row, or of silu(row) * factor, rounded, with lines of a matrix. Float32."""
    is_first = tl.arange(0, PAIRS)[:, None] == 0
    total = tl.zeros([PAIRS, BLOCK], tl.float32)
    for begin in range(0, SIZE, STEP):
        column = begin + tl.arange(0, STEP)
        real = (column < SIZE)[None, :]
        block = tl.load(matrix + column[None, :], mask=real_output[:, None] & real, other=0.0)
        places = column[None, :] + tl.zeros([PAIRS, 1], tl.int32)
        value = tl.load(row + places, mask=is_first & real, other=0.0)
        if factor is not None:
            gate = value.to(tl.float32)
            gate = gate * sigmoid(gate)
            value = (gate * tl.load(factor + places, mask=is_first & real, other=0.0).to(tl.float32)).to(value.dtype)
        total = tl.dot(value, tl.trans(block), total, input_precision="ieee")
    return tl.sum(tl.where(is_first, total, 0.0), 0)
