"""Experts for thousands of tokens: rows sorted by expert on the device, then torch's grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.linear import linear as usual_linear
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.moe.routing import list_pairs
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.experts import Activation, SharedExpert
from weft.kernels.weight import Weight

BLOCK = 1024
# Alignment of rows and matrices, in bytes.
ALIGNMENT = 16


def can_group(first: Tensor, second: Tensor) -> bool:
    """Return whether torch's grouped matmul supports these experts."""
    aligned = all(size * first.element_size() % ALIGNMENT == 0 for size in (*first.shape[1:], *second.shape[1:]))
    return first.dtype == torch.bfloat16 and aligned


def many_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    shared: SharedExpert | None,
    linear: Callable[[Tensor, Weight], Tensor] = usual_linear,
) -> Tensor:
    lists = list_pairs(chosen, len(first))
    ends = lists.sizes.cumsum(0, dtype=torch.int32)
    rows, place = sort_rows(x, chosen, lists.places, lists.sizes, ends)
    outer = F.grouped_mm(rows, first.transpose(1, 2), offs=ends)
    inner = apply_between(outer, place, chosen, activation, first_bias)
    results = F.grouped_mm(inner, second.transpose(1, 2), offs=ends)
    return weighted_sum(results, weights, shared, place, chosen, second_bias, linear)


def sort_rows(x: Tensor, chosen: Tensor, places: Tensor, sizes: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row for every pair, sorted by expert, and each pair's index there."""
    tokens, hidden = x.shape
    k = chosen.shape[1]
    rows = torch.empty(tokens * k, hidden, dtype=x.dtype, device=x.device)
    place = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    block = min(2 * BLOCK, power_of_two(hidden))
    sort_rows_kernel[(tokens,)](
        named(
            x=x, chosen=chosen, places=places, sizes=sizes, ends=ends, rows=rows, place=place, x_stride=x.stride(0),
        ),
        K=k, HIDDEN=hidden, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return rows, place


@jit
def sort_rows_kernel(
    x, chosen, places, sizes, ends, rows, place, x_stride, K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for begin in tl.static_range(0, HIDDEN, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(x + token * x_stride + column, mask=column < HIDDEN)
        for j in tl.static_range(K):
            pair = token * K + j
            expert = tl.load(chosen + pair)
            row = tl.load(ends + expert) - tl.load(sizes + expert) + tl.load(places + pair)
            tl.store(rows + row.to(tl.int64) * HIDDEN + column, value, mask=column < HIDDEN)
            tl.store(place + pair, row)


def apply_between(outer: Tensor, place: Tensor, chosen: Tensor, activation: Activation, bias: Tensor | None) -> Tensor:
    pairs, inner = outer.shape[0], outer.shape[1] // activation.parts
    out = torch.empty(pairs, inner, dtype=outer.dtype, device=outer.device)
    block = min(BLOCK, power_of_two(inner))
    between_kernel[(pairs, -(-inner // block))](
        named(
            outer=outer, place=place, chosen=chosen, bias=bias, out=out, alpha=activation.alpha,
            limit=activation.limit,
        ),
        INNER=inner, NAME=activation.name, PARTS=activation.parts, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@jit
def between_kernel(
    outer, place, chosen, bias, out, alpha, limit,
    INNER: tl.constexpr, NAME: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < INNER
    # Without a bias the row's expert does not matter.
    if bias is not None:
        pair = tl.program_id(0)
        row = tl.load(place + pair).to(tl.int64)
    gate = tl.load(outer + row * (PARTS * INNER) + column, mask=real, other=0.0).to(tl.float32)
    up = gate
    if PARTS == 2:
        up = tl.load(outer + row * (PARTS * INNER) + INNER + column, mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        biases = bias + tl.load(chosen + pair).to(tl.int64) * (PARTS * INNER) + column
        gate += tl.load(biases, mask=real, other=0.0).to(tl.float32)
        if PARTS == 2:
            up += tl.load(biases + INNER, mask=real, other=0.0).to(tl.float32)
    value = between(gate, up, alpha, limit, NAME, PARTS)
    tl.store(out + row * INNER + column, value.to(out.dtype.element_ty), mask=real)
