"""Experts whose weights, or whose shared expert's, are not plain numbers.

Packed ones have the kernels of `packed.py`. Here, a
program computes some outputs of one expert for all its pairs. Matmuls are rounded before biases and activations, and
a pair has the same bits whatever the other pairs are.
"""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.formats.tiles import form_of, load_tile, pointers
from weft.kernels.cuda.launch.launching import jit, named
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe.packed import can_pack, pair_results
from weft.kernels.cuda.moe.routing import Lists, list_pairs
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.formats.rounded import RoundedRows
from weft.kernels.formats.stored import Stored
from weft.kernels.plain import moe as plain

# Pairs and outputs of a program.
PAIRS, OUTPUTS = 16, 64


def stored_experts(
    x: Float[Tensor, "tokens hidden"],
    routing: Routing,
    layer: ExpertWeights,
    shared: SharedExpert | None,
    exact: bool = False,
) -> Float[Tensor, "tokens hidden"]:
    """Return the mixture. `exact`: a token has the same bits in any batch."""
    weights, chosen = routing
    linear = partial(multiply_stored, exact=exact)
    if not len(x):
        return x.new_empty(x.shape)
    if can_pack(layer):
        return weighted_sum(pair_results(x, chosen, layer, exact), weights, shared, linear=linear)
    if any(form_of(unrounded(each)) is None for each in (layer.first, layer.second)):
        return plain.mixture(x, routing, layer, shared, linear) if exact else plain.experts(x, routing, layer, shared)
    lists = list_pairs(chosen, layer.first.experts)
    outer = multiply_experts(x, chosen.shape[1], chosen, lists, layer.first, layer.first_bias)
    inner = layer.activation(outer)
    results = multiply_experts(inner, 1, chosen, lists, layer.second, layer.second_bias)
    return weighted_sum(results, weights, shared, linear=linear)


def unrounded(stored: Stored) -> Stored:
    return stored.format.as_stored(stored) if isinstance(stored.format, RoundedRows) else stored


def multiply_experts(
    x: Float[Tensor, "rows inputs"],
    pairs_per_row: int,
    chosen: Int[Tensor, "tokens k"],
    lists: Lists,
    matrices: Stored,
    bias: Float[Tensor, "experts outputs"] | None,
) -> Float[Tensor, "pairs outputs"]:
    """Return matrix of the pair's expert @ x[pair // pairs_per_row] + bias, for every pair."""
    if isinstance(matrices.format, RoundedRows):
        x, matrices = matrices.format.rounded(x).to(x.dtype), matrices.format.as_stored(matrices)
    form = form_of(matrices)
    assert form is not None
    out = torch.empty(chosen.numel(), matrices.outputs, dtype=x.dtype, device=x.device)
    stored_experts_kernel[(-(-matrices.outputs // OUTPUTS), matrices.experts)](
        named(x=x.contiguous(), listed=lists.listed, sizes=lists.sizes, tokens=lists.listed.shape[1]),
        pointers(matrices), named(bias=bias, out=out, outputs=matrices.outputs, inputs=matrices.inputs),
        ROW_PAIRS=pairs_per_row, PAIRS=PAIRS, OUTPUTS=OUTPUTS, **form.constants, num_warps=4, num_stages=3,
        **early(x),
    )  # fmt: skip
    return out


@jit(do_not_specialize=["tokens"])
def stored_experts_kernel(
    x, listed, sizes, tokens, codes, scales, more, bias, out, outputs, inputs,
    ROW_PAIRS: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    expert = tl.program_id(1)
    size = tl.load(sizes + expert)
    ours = listed + expert.to(tl.int64) * tokens
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    for first in range(0, size, PAIRS):
        index = first + tl.arange(0, PAIRS)
        is_pair = (index < size)[:, None]
        pair = tl.load(ours + index, mask=index < size, other=0)
        rows = x + (pair // ROW_PAIRS).to(tl.int64)[:, None] * inputs
        total = tl.zeros((PAIRS, OUTPUTS), tl.float32)
        for begin in range(0, inputs, STEP):
            column = begin + tl.arange(0, STEP)
            value = tl.load(rows + column[None, :], mask=is_pair & (column < inputs)[None, :], other=0.0)
            tile, scale = load_tile(
                codes, scales, more, expert, output, column, outputs, inputs, FORMAT, BLOCK_ROWS, BLOCK_COLUMNS
            )
            total += tl.dot(value, tl.trans(tile.to(value.dtype)), input_precision="ieee") * scale[None, :]
        if bias is not None:
            biases = bias + expert.to(tl.int64) * outputs + output
            total += tl.load(biases, mask=is_output, other=0.0).to(tl.float32)[None, :]
        target = out + pair.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=is_pair & is_output[None, :])
