"""Experts for a handful of tokens: every pair reads the weights of its expert, in matrix-vector form.

Not for many tokens: an expert that two tokens chose is read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launch.launching import Arguments, jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.between import between, sigmoid
from weft.kernels.cuda.linear.vectors import Vectors, add_products, hold, piece, pieces, tile, tiles
from weft.kernels.experts import Activation, SharedExpert


def few_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    shared: SharedExpert | None,
    blocks: tuple[Vectors, Vectors],
) -> Tensor:
    tokens, hidden = x.shape
    inner, k = second.shape[2], chosen.shape[1]
    between_them = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    own, other = blocks
    few_first_kernel[(-(-inner // own.rows), tokens * k)](
        named(
            x=x, chosen=chosen, first=first, bias=first_bias, out=between_them, alpha=activation.alpha,
            limit=activation.limit,
        ),
        K=k, HIDDEN=hidden, INNER=inner, NAME=activation.name, PARTS=activation.parts, ROWS=own.rows,
        COLUMNS=own.columns, ONCE=tokens == 1, num_warps=own.warps, **early(x),
    )  # fmt: skip
    few_second_kernel[(-(-hidden // other.rows), tokens)](
        named(inputs=between_them, weights=weights, chosen=chosen, second=second, bias=second_bias, out=out),
        shared_expert(shared),
        K=k, HIDDEN=hidden, INNER=inner, SHARED=0 if shared is None else shared.second.inputs,
        ROWS=other.rows, COLUMNS=other.columns, AT_ONCE=other.at_once(x.element_size()),
        ONCE=tokens == 1, num_warps=other.warps, **early(x),
    )  # fmt: skip
    return out


def shared_expert(shared: SharedExpert | None) -> Arguments:
    """Return the second kernel's inputs of a shared expert. Gate and up are parts of one matmul: their strides are
    equal.
    """
    if shared is None:
        return NOT_SHARED
    opening = shared.opening
    assert shared.gate.stride() == shared.up.stride()
    return named(
        shared_gate=shared.gate, shared_up=shared.up, shared_second=shared.second.matrix, opening=opening,
        gate_stride=shared.gate.stride(0), opening_stride=0 if opening is None else opening.stride(0),
    )  # fmt: skip


NOT_SHARED = named(shared_gate=None, shared_up=None, shared_second=None, opening=None, gate_stride=0, opening_stride=0)


@jit
def few_first_kernel(
    x, chosen, first, bias, out, alpha, limit,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute activation(first(x)) of one pair, ROWS rows of it."""
    wait(EARLY)
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_row = row < INNER
    expert = tl.load(chosen + pair).to(tl.int64)
    gates = first + expert * (PARTS * INNER * HIDDEN)
    gate_tiles = tiles(gates, row, real_row, HIDDEN, COLUMNS, ONCE)
    if PARTS == 2:
        up_tiles = tiles(gates + INNER * HIDDEN, row, real_row, HIDDEN, COLUMNS, ONCE)
    gate_bias, up_bias = 0.0, 0.0
    if bias is not None:
        biases = bias + expert * (PARTS * INNER) + row
        gate_bias = tl.load(biases, mask=real_row, other=0.0).to(tl.float32)
        if PARTS == 2:
            up_bias = tl.load(biases + INNER, mask=real_row, other=0.0).to(tl.float32)
    hold()
    values = pieces(x + (pair // K).to(tl.int64) * HIDDEN, HIDDEN, COLUMNS)
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate = add_products(nothing, gate_tiles, values, 1.0, HIDDEN)
    if PARTS == 2:
        up = add_products(nothing, up_tiles, values, 1.0, HIDDEN)
        gate, up = tl.split(tl.sum(tl.join(gate, up), 1))
    else:
        gate, up = tl.sum(gate, 1), 0.0
    result = between(gate + gate_bias, up + up_bias, alpha, limit, NAME, PARTS)
    tl.store(out + pair.to(tl.int64) * INNER + row, result.to(out.dtype.element_ty), mask=real_row)


@jit
def few_second_kernel(
    inputs, weights, chosen, second, bias, out,
    shared_gate, shared_up, shared_second, opening, gate_stride, opening_stride,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the weighted sum over one token's choices, ROWS rows of it. AT_ONCE pieces of matrices load at once."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_row = row < HIDDEN
    # Weights are older than any step: load these while the previous kernel still runs. Choices are older than that
    # kernel too: all its programs had waited for them before this one could start. (Loading the experts this early
    # would take bandwidth from it.)
    if SHARED > 0:
        shared_tiles = tiles(shared_second, row, real_row, SHARED, COLUMNS, ONCE)
    experts, factors = (), ()
    for j in tl.static_range(K):
        experts += (tl.load(chosen + token * K + j).to(tl.int64),)
        factors += (tl.load(weights + token * K + j).to(tl.float32),)
    wait(EARLY)
    added = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    PIECES: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    for begin in tl.static_range(0, K * PIECES, AT_ONCE):
        blocks = ()
        for number in tl.static_range(begin, min(begin + AT_ONCE, K * PIECES)):
            matrix = second + experts[number // PIECES] * (HIDDEN * INNER)
            blocks += (tile(matrix, row, real_row, number % PIECES, INNER, COLUMNS, ONCE),)
        if bias is not None and begin == 0:
            for j in tl.static_range(K):
                one = tl.load(bias + experts[j] * HIDDEN + row, mask=real_row, other=0.0)
                added += one.to(tl.float32) * factors[j]
        hold()
        if SHARED > 0 and begin == 0:
            factor = 1.0
            if opening is not None:
                factor = sigmoid(tl.load(opening + token * opening_stride).to(tl.float32))
            values = gated(shared_gate + token * gate_stride, shared_up + token * gate_stride, SHARED, COLUMNS)
            total = add_products(total, shared_tiles, values, factor, SHARED)
        for number in tl.static_range(begin, min(begin + AT_ONCE, K * PIECES)):
            vector = inputs + (token * K + number // PIECES).to(tl.int64) * INNER
            value = piece(vector, number % PIECES, INNER, COLUMNS).to(tl.float32) * factors[number // PIECES]
            total += blocks[number - begin].to(tl.float32) * value[None, :]
    result = tl.sum(total, 1) + added
    tl.store(out + token.to(tl.int64) * HIDDEN + row, result.to(out.dtype.element_ty), mask=real_row)


@triton.jit
def gated(gate, up, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return silu(gate) * up, in pieces of the same size."""
    gates, ups = pieces(gate, SIZE, COLUMNS), pieces(up, SIZE, COLUMNS)
    found = ()
    for i in tl.static_range((SIZE + COLUMNS - 1) // COLUMNS):
        value = gates[i].to(tl.float32)
        found += (value * sigmoid(value) * ups[i].to(tl.float32),)
    return found
