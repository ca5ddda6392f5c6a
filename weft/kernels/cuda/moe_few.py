"""Experts for a handful of tokens: every pair reads the weights of its expert, as products with one vector.

Not for many tokens: an expert that two tokens chose is read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launching import jit
from weft.kernels.cuda.moe_activation import between, sigmoid
from weft.kernels.cuda.moe_choices import Vectors
from weft.kernels.cuda.overlap import early, wait
from weft.kernels.moe import Activation, Shared


def few_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    shared: Shared | None,
    blocks: tuple[Vectors, Vectors],
) -> Tensor:
    tokens, hidden = x.shape
    inner, k = second.shape[2], chosen.shape[1]
    between_them = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    own, other = blocks
    few_first_kernel[(-(-inner // own.rows), tokens * k)](
        x, chosen, first, first_bias, between_them, activation.alpha, activation.limit,
        K=k, HIDDEN=hidden, INNER=inner, NAME=activation.name, PARTS=activation.parts,
        ROWS=own.rows, COLUMNS=own.columns, STAGES=own.stages, num_warps=own.warps, **early(x),
    )  # fmt: skip
    few_second_kernel[(-(-hidden // other.rows), tokens)](
        between_them, weights, chosen, second, second_bias, *shared_parts(shared), out,
        K=k, HIDDEN=hidden, INNER=inner, SHARED=0 if shared is None else shared.second.shape[1], CHOICES=other.choices,
        ROWS=other.rows, COLUMNS=other.columns, STAGES=other.stages, num_warps=other.warps, **early(x),
    )  # fmt: skip
    return out


def shared_parts(shared: Shared | None) -> tuple[Tensor | int | None, ...]:
    """What the second kernel needs of a shared expert. Gate and up are parts of one product: their rows lie alike."""
    if shared is None:
        return None, None, None, None, 0, 0
    opening = shared.opening
    assert shared.gate.stride() == shared.up.stride()
    strides = (shared.gate.stride(0), 0 if opening is None else opening.stride(0))
    return shared.gate, shared.up, shared.second, opening, *strides


@jit
def few_first_kernel(
    x, chosen, first, bias, out, alpha, limit,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """activation(first(x)) of one pair, so many rows of it."""
    wait(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_row = row < INNER
    vector = x + (pair // K).to(tl.int64) * HIDDEN
    gates = first + expert * (PARTS * INNER * HIDDEN) + row[:, None] * HIDDEN
    # Columns are added up in their places, and only at the end across them.
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        column = begin + tl.arange(0, COLUMNS)
        real = real_row[:, None] & (column < HIDDEN)[None, :]
        value = tl.load(vector + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + column[None, :], mask=real, other=0.0).to(tl.float32) * value
        if PARTS == 2:
            up += tl.load(gates + INNER * HIDDEN + column[None, :], mask=real, other=0.0).to(tl.float32) * value
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        biases = bias + expert * (PARTS * INNER) + row
        gate_sum += tl.load(biases, mask=real_row, other=0.0).to(tl.float32)
        if PARTS == 2:
            up_sum += tl.load(biases + INNER, mask=real_row, other=0.0).to(tl.float32)
    result = between(gate_sum, up_sum, alpha, limit, NAME, PARTS)
    tl.store(out + pair.to(tl.int64) * INNER + row, result.to(out.dtype.element_ty), mask=real_row)


@jit
def few_second_kernel(
    inputs, weights, chosen, second, bias,
    shared_gate, shared_up, shared_second, opening, gate_stride, opening_stride, out,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The weighted sum over one token's choices, so many rows of it; so many choices are read side by side."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_row = row < HIDDEN
    # Known before the router chose: the kernel before this one may still be at work.
    result = tl.zeros([ROWS], tl.float32)
    if SHARED > 0:
        result = shared_rows(
            shared_gate + token * gate_stride, shared_up + token * gate_stride, shared_second, row, HIDDEN, SHARED
        )
        if opening is not None:
            result *= sigmoid(tl.load(opening + token * opening_stride).to(tl.float32))
    wait(EARLY)
    total = tl.zeros([CHOICES, ROWS, COLUMNS], tl.float32)
    BLOCKS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (K + CHOICES - 1) // CHOICES * BLOCKS
    for step in tl.range(0, STEPS, num_stages=STAGES):
        choice = step // BLOCKS * CHOICES + tl.arange(0, CHOICES)
        column = step % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        pair = token * K + choice
        expert = tl.load(chosen + pair, mask=choice < K, other=0).to(tl.int64)
        real = (choice < K)[:, None] & (column < INNER)[None, :]
        value = tl.load(inputs + pair.to(tl.int64)[:, None] * INNER + column[None, :], mask=real, other=0.0)
        value = value.to(tl.float32) * tl.load(weights + pair, mask=choice < K, other=0.0).to(tl.float32)[:, None]
        matrix = second + expert[:, None, None] * (HIDDEN * INNER) + row[None, :, None] * INNER + column[None, None, :]
        block = tl.load(matrix, mask=real[:, None, :] & real_row[None, :, None], other=0.0)
        total += block.to(tl.float32) * value[:, None, :]
    result += tl.sum(tl.sum(total, 2), 0)
    if bias is not None:
        for j in tl.static_range(K):
            expert = tl.load(chosen + token * K + j).to(tl.int64)
            added = tl.load(bias + expert * HIDDEN + row, mask=real_row, other=0.0).to(tl.float32)
            result += tl.load(weights + token * K + j).to(tl.float32) * added
    tl.store(out + token.to(tl.int64) * HIDDEN + row, result.to(out.dtype.element_ty), mask=real_row)


@triton.jit
def shared_rows(gate, up, second, row, HIDDEN: tl.constexpr, SHARED: tl.constexpr):
    """Some rows of second @ (silu(gate) * up), for one token."""
    STEP: tl.constexpr = 512
    total = tl.zeros([row.shape[0], STEP], tl.float32)
    for begin in tl.static_range(0, SHARED, STEP):
        column = begin + tl.arange(0, STEP)
        real = column < SHARED
        opened = tl.load(gate + column, mask=real, other=0.0).to(tl.float32)
        value = opened * sigmoid(opened) * tl.load(up + column, mask=real, other=0.0).to(tl.float32)
        place = second + row[:, None] * SHARED + column[None, :]
        total += tl.load(place, mask=(row < HIDDEN)[:, None] & real[None, :], other=0.0).to(tl.float32) * value[None, :]
    return tl.sum(total, 1)
