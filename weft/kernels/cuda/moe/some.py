"""Experts for a batch of tokens: a grouped matmul that reads the weights of every chosen expert once.

With few tokens, a program computes some outputs of one expert for all its pairs; programs of experts without pairs
end at once. With many, it computes one tile of an expert's pairs. The grid depends on the number of tokens, not on
their choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launch.launching import Arguments, jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.between import between
from weft.kernels.cuda.moe.choices import Tiles
from weft.kernels.cuda.moe.routing import Lists, list_pairs
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.experts import Activation, SharedExpert


def some_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    shared: SharedExpert | None,
    blocks: tuple[Tiles, Tiles],
    tiled: bool,
) -> Tensor:
    tokens, hidden = x.shape
    count, _, inner = second.shape
    k = chosen.shape[1]
    assert blocks[0].pairs == blocks[1].pairs
    lists = list_pairs(chosen, count, blocks[0].pairs if tiled else None)
    between_them = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    results = torch.empty(tokens * k, hidden, dtype=x.dtype, device=x.device)
    name, parts, settings = activation.name, activation.parts, (activation.alpha, activation.limit)
    multiply(x, k, chosen, lists, first, first_bias, between_them, blocks[0], name, parts, settings)
    multiply(between_them, 1, chosen, lists, second, second_bias, results, blocks[1])
    return weighted_sum(results, weights, shared)


def multiply(
    x: Tensor,
    pairs_per_row: int,
    chosen: Tensor,
    lists: Lists,
    matrices: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    name: str = "",
    parts: int = 1,
    settings: tuple[float, float] = (0.0, 0.0),
    rounded: bool = False,
) -> None:
    """Compute out[pair] = activation(matrix of the pair's expert @ x[pair // pairs_per_row] + bias).

    `rounded`: round the matmul as one that is stored.
    """
    (pairs, outputs), count = out.shape, len(matrices)
    # Every expert may have a partial tile, but no more tiles than pairs can be non-empty.
    by, slots = "pair" if pairs < count else "expert", min(pairs, count)
    if lists.tile_ends is not None:
        by, slots = "tile", min(pairs, count + pairs // tiles.pairs)
    grouped_kernel[(-(-outputs // tiles.outputs), slots)](
        named(x=x, chosen=chosen), arguments_of(lists),
        named(matrices=matrices, bias=bias, out=out, alpha=settings[0], limit=settings[1]),
        BY=by, COUNT=count, COUNT_BLOCK=power_of_two(count), ROW_PAIRS=pairs_per_row,
        INPUTS=x.shape[1], OUTPUTS=outputs, NAME=name, PARTS=parts,
        PAIR_BLOCK=tiles.pairs, BLOCK=tiles.outputs, STEP=tiles.inputs,
        WEIGHTS_FIRST=tiles.weights_first, ROUNDED=rounded, num_warps=tiles.warps, num_stages=tiles.stages, **early(x),
    )  # fmt: skip


def arguments_of(lists: Lists) -> Arguments:
    return named(
        listed=lists.listed, sizes=lists.sizes, places=lists.places, tile_ends=lists.tile_ends,
        tokens=lists.listed.shape[1],
    )  # fmt: skip


# Do not specialize on the number of tokens: one kernel serves all.
@jit(do_not_specialize=["tokens"])
def grouped_kernel(
    x, chosen, listed, sizes, places, tile_ends, tokens, matrices, bias, out, alpha, limit,
    BY: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr,
    ROW_PAIRS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    NAME: tl.constexpr, PARTS: tl.constexpr, PAIR_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, ROUNDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    slot = tl.program_id(1)
    expert = slot
    start = 0
    if BY == "pair":
        # Fewer pairs than experts: the first pair of an expert stands for all of them.
        if tl.load(places + slot) > 0:
            return
        expert = tl.load(chosen + slot).to(tl.int32)
    if BY == "tile":
        number = tl.arange(0, COUNT_BLOCK)
        ends = tl.load(tile_ends + number, mask=number < COUNT, other=2147483647)
        expert = tl.sum((ends <= slot).to(tl.int32), 0)
        if expert >= COUNT:
            return
        start = (slot - tl.max(tl.where(ends <= slot, ends, 0), 0)) * PAIR_BLOCK
    size = tl.load(sizes + expert)
    ours = listed + expert.to(tl.int64) * tokens
    if BY == "tile":
        size = tl.minimum(size, start + PAIR_BLOCK)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real_output = output < OUTPUTS
    gates = matrices + expert.to(tl.int64) * (PARTS * OUTPUTS * INPUTS) + output[:, None] * INPUTS
    for begin in range(start, size, PAIR_BLOCK):
        index = begin + tl.arange(0, PAIR_BLOCK)
        real_pair = index < size
        pair = tl.load(ours + index, mask=real_pair, other=0)
        rows = x + (pair // ROW_PAIRS).to(tl.int64)[:, None] * INPUTS
        gate, up = products(
            rows, real_pair, gates, real_output,
            OUTPUTS, INPUTS, PARTS, PAIR_BLOCK, BLOCK, STEP, WEIGHTS_FIRST,
        )  # fmt: skip
        if ROUNDED:
            gate = gate.to(out.dtype.element_ty).to(tl.float32)
            up = up.to(out.dtype.element_ty).to(tl.float32)
        if bias is not None:
            biases = bias + expert.to(tl.int64) * (PARTS * OUTPUTS) + output
            gate += tl.load(biases, mask=real_output, other=0.0).to(tl.float32)[None, :]
            if PARTS == 2:
                up += tl.load(biases + OUTPUTS, mask=real_output, other=0.0).to(tl.float32)[None, :]
        if NAME != "":
            gate = between(gate, up, alpha, limit, NAME, PARTS)
        target = out + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        tl.store(target, gate.to(out.dtype.element_ty), mask=real_pair[:, None] & real_output[None, :])


@triton.jit
def products(
    rows, real_pair, gates, real_output,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the [pairs, outputs] matmuls of the gates and, with two parts, of the gated values."""
    gate = tl.zeros([BLOCK if WEIGHTS_FIRST else PAIR_BLOCK, PAIR_BLOCK if WEIGHTS_FIRST else BLOCK], tl.float32)
    up = gate
    for begin in range(0, INPUTS, STEP):
        column = begin + tl.arange(0, STEP)
        real = (column < INPUTS)[None, :]
        row_block = tl.load(rows + column[None, :], mask=real_pair[:, None] & real, other=0.0)
        gate_block = tl.load(gates + column[None, :], mask=real_output[:, None] & real, other=0.0)
        gate = accumulate(gate, row_block, gate_block, WEIGHTS_FIRST)
        if PARTS == 2:
            up_block = tl.load(gates + OUTPUTS * INPUTS + column[None, :], mask=real_output[:, None] & real, other=0.0)
            up = accumulate(up, row_block, up_block, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        gate, up = tl.trans(gate), tl.trans(up)
    return gate, up


@triton.jit
def accumulate(total, rows, matrix, WEIGHTS_FIRST: tl.constexpr):
    # Float32 models stay float32; other dtypes have no precision setting.
    if WEIGHTS_FIRST:
        total = tl.dot(matrix, tl.trans(rows), total, input_precision="ieee")
    else:
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
    return total
