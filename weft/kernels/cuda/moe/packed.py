"""Experts with packed weights: a grouped matmul that decodes codes where it reads them, for any number of tokens.

For a handful of tokens, every pair of a token and its choice is computed alone and nothing is sorted. With more, a
program multiplies some outputs of an expert with its pairs, so that codes are read, and decoded, once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.formats.codes import STEP, form_of, more_of_expert, most_rows, of_expert, summed
from weft.kernels.cuda.formats.lines import CodeLines
from weft.kernels.cuda.formats.packed import LINES, CodeTiles
from weft.kernels.cuda.formats.packed import STEP as TILE_INPUTS
from weft.kernels.cuda.formats.tiles import pointers
from weft.kernels.cuda.launch.launching import Arguments, jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.linear.packed import between_parts, lines_of
from weft.kernels.cuda.linear.rounding import rows_in_fp8
from weft.kernels.cuda.moe.choices import FEW_PAIRS, WHOLE_TOKENS, most_tokens
from weft.kernels.cuda.moe.routing import Lists, list_pairs
from weft.kernels.experts import Activation, ExpertWeights
from weft.kernels.formats.stored import Stored


class PairTiles(NamedTuple):
    """Tile sizes of a grouped matmul: pairs and outputs of a program."""

    pairs: int
    outputs: int
    warps: int
    stages: int
    rows_first: bool  # pairs are the first operand of the matmul: decoded weights pass through shared memory


# Of both matmuls: of pairs that are computed alone, and by the number of pairs per tile.
ALONE = (PairTiles(8, 32, 2, 4, False),) * 2
TILES = {
    8: (PairTiles(8, 128, 4, 3, False),) * 2,
    16: (PairTiles(16, 64, 4, 4, False),) * 2,
    32: (PairTiles(32, 64, 4, 4, False),) * 2,
    64: (PairTiles(64, 64, 4, 3, False),) * 2,
    128: (PairTiles(128, 128, 8, 3, False),) * 2,
}
# Of rows in FP8, whose sums are added up twice. Not measured yet.
OF_LINES = {size: (PairTiles(size, 64, 4, 4, False),) * 2 for size in (8, 16, 32, 64, 128)}
# Of exact mode, which adds up in the same order with all of them.
EXACT = {size: (PairTiles(size, 64, 4, 3, False),) * 2 for size in (16, 32, 64, 128)}


def can_pack(layer: ExpertWeights) -> bool:
    """Return whether these kernels multiply with both matrices of all experts."""
    whole = layer.first.outputs % (LINES * layer.activation.parts) == 0
    return whole and all(isinstance(each.format, CodeTiles) for each in (layer.first, layer.second))


def tiles_of(tokens: int, k: int, layer: ExpertWeights, exact: bool = False) -> tuple[PairTiles, PairTiles]:
    """Return the tiles of both matmuls, so that most experts have all their pairs in one."""
    experts = layer.first.experts
    if not exact and are_alone(tokens, k, experts):
        return OF_LINES[8] if isinstance(layer.first.format, CodeLines) else ALONE
    tiles = EXACT if exact else OF_LINES if isinstance(layer.first.format, CodeLines) else TILES
    most = min(most_rows(each) for each in (layer.first, layer.second))
    return tiles[min(most, next((size for size in tiles if tokens <= most_tokens(size, k, experts)), 128))]


def are_alone(tokens: int, k: int, experts: int) -> bool:
    """Return whether every pair is computed alone."""
    return tokens == 1 or tokens * k <= FEW_PAIRS * experts


def pair_results(
    x: Float[Tensor, "tokens hidden"],
    chosen: Int[Tensor, "tokens k"],
    layer: ExpertWeights,
    exact: bool = False,
    by: tuple[PairTiles, PairTiles] | None = None,
) -> Float[Tensor, "pairs hidden"]:
    """Return the output of every pair's expert. `exact`: a pair has the same bits whatever the others are."""
    (tokens, k), count, kind = chosen.shape, layer.first.experts, layer.activation
    own, other = by or tiles_of(tokens, k, layer, exact)
    assert own.pairs == other.pairs
    lists = None
    if exact or not are_alone(tokens, k, count):
        lists = list_pairs(chosen, count, own.pairs if tokens > WHOLE_TOKENS else None)
    inner = multiply_experts(x, k, chosen, lists, layer.first, layer.first_bias, own, exact, kind)
    return multiply_experts(inner, 1, chosen, lists, layer.second, layer.second_bias, other, exact)


def multiply_experts(
    x: Float[Tensor, "rows inputs"],
    pairs_per_row: int,
    chosen: Int[Tensor, "tokens k"],
    lists: Lists | None,
    matrices: Stored,
    bias: Float[Tensor, "experts outputs"] | None,
    tiles: PairTiles,
    exact: bool,
    activation: Activation | None = None,
) -> Float[Tensor, "pairs results"]:
    """Return activation(matrix of the pair's expert @ x[pair // pairs_per_row] + bias) of every pair."""
    form, pairs, count = form_of(matrices), chosen.numel(), matrices.experts
    assert form is not None
    parts = 1 if activation is None else activation.parts
    fold = exact or x.dtype != torch.bfloat16
    out = torch.empty(pairs, matrices.outputs // parts, dtype=x.dtype, device=x.device)
    values, factors = rows_in_fp8(x) if isinstance(matrices.format, CodeLines) else (x, None)
    # Every expert may have a partial tile, but no more tiles than pairs can be non-empty.
    by, slots = "pair" if pairs < count else "expert", min(pairs, count)
    if lists is None:
        by, slots = "alone", pairs
    elif lists.tile_ends is not None:
        by, slots = "tile", min(pairs, count + pairs // tiles.pairs)
    packed_experts_kernel[(-(-out.shape[1] // (tiles.outputs // parts)), slots)](
        named(x=values, factors=factors, chosen=chosen), listed(lists), pointers(matrices),
        named(
            bias=bias, out=out, outputs=matrices.outputs, inputs=matrices.inputs,
            alpha=0.0 if activation is None else activation.alpha,
            limit=0.0 if activation is None else activation.limit,
        ),
        BY=by, COUNT=count, COUNT_BLOCK=power_of_two(count), ROW_PAIRS=pairs_per_row,
        NAME="" if activation is None else activation.name, PARTS=parts, ROUNDED=exact,
        FOLD=fold, **form, EVEN=matrices.inputs % TILE_INPUTS == 0,
        ROWS=tiles.pairs, OUTPUTS=tiles.outputs, ROWS_FIRST=tiles.rows_first,
        num_warps=tiles.warps, num_stages=tiles.stages, **early(x),
    )  # fmt: skip
    return out


def listed(lists: Lists | None) -> Arguments:
    if lists is None:
        return NOT_LISTED
    return named(
        listed=lists.listed, sizes=lists.sizes, places=lists.places, tile_ends=lists.tile_ends,
        tokens=lists.listed.shape[1],
    )  # fmt: skip


NOT_LISTED = named(listed=None, sizes=None, places=None, tile_ends=None, tokens=0)


@jit(do_not_specialize=["tokens"])
def packed_experts_kernel(
    x, factors, chosen, listed, sizes, places, tile_ends, tokens, codes, scales, more, bias, out, outputs, inputs,
    alpha, limit, BY: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, ROW_PAIRS: tl.constexpr,
    NAME: tl.constexpr, PARTS: tl.constexpr, ROUNDED: tl.constexpr, FOLD: tl.constexpr,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RUNS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    slot = tl.program_id(1)
    expert, start, size = slot, 0, 1
    if BY == "alone":
        expert = tl.load(chosen + slot).to(tl.int32)
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
        start = (slot - tl.max(tl.where(ends <= slot, ends, 0), 0)) * ROWS
    if BY != "alone":
        size = tl.load(sizes + expert)
        ours = listed + expert.to(tl.int64) * tokens
    if BY == "tile":
        size = tl.minimum(size, start + ROWS)
    results = outputs // PARTS
    output, is_output = lines_of(tl.program_id(0), results, OUTPUTS, PARTS)
    result = tl.program_id(0) * (OUTPUTS // PARTS) + tl.arange(0, OUTPUTS // PARTS)
    codes, scales = of_expert(codes, scales, expert, outputs, inputs, FORMAT, PAIRS, BLOCK_ROWS, RUNS)
    if more is not None:
        more = more_of_expert(more, expert, outputs, inputs, FORMAT, RUNS)
    for begin in range(start, size, ROWS):
        index = begin + tl.arange(0, ROWS)
        is_pair = index < size
        pair = slot + index * 0 if BY == "alone" else tl.load(ours + index, mask=is_pair, other=0)
        values, of_rows = x + (pair // ROW_PAIRS).to(tl.int64) * inputs, factors
        if factors is not None:
            of_rows = factors + (pair // ROW_PAIRS).to(tl.int64) * tl.cdiv(inputs, STEP)
            values = x + (pair // ROW_PAIRS).to(tl.int64) * (tl.cdiv(inputs, STEP) * STEP)
        total = summed(
            values, of_rows, is_pair, codes, scales, more, output, inputs,
            0, tl.cdiv(inputs, STEP), FORMAT, PAIRS, BLOCK_ROWS, RUNS, FOLD, ROWS, OUTPUTS, ROWS_FIRST, EVEN,
        )  # fmt: skip
        if ROUNDED:
            total = total.to(out.dtype.element_ty).to(tl.float32)
        if bias is not None:
            biases = bias + expert.to(tl.int64) * outputs + output
            total += tl.load(biases, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if NAME != "":
            total = between_parts(total, alpha, limit, NAME, PARTS, OUTPUTS, ROWS)
        target = out + pair.to(tl.int64)[None, :] * results + result[:, None]
        real = is_pair[None, :] & (result < results)[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=real)
