"""Routing on a GPU: the choice of experts in one kernel, and the pairs of every expert.

A pair is a token and one of its choices; pair p is choice p % k of token p // k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.moe.choices import LIST_BLOCKS
from weft.kernels.cuda.ordering import rising_key

# Below every eligible score.
LEAST_RANK = tl.constexpr(-(2**31))


def route(
    logits: Float[Tensor, "tokens experts"],
    k: int,
    scoring: str,
    bias: Float[Tensor, "*tokens experts"] | None = None,
    renormalise: bool = True,
    scaling: float = 1.0,
    eps: float = 0.0,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the k experts with the greatest scores, the first among equals; `scoring` is softmax or sigmoid.

    `bias` is added to the scores for the choice only: one for all tokens, or one each.
    """
    tokens, count = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if tokens:
        # One warp, whose integer maximum is a single instruction.
        route_kernel[(tokens,)](
            named(
                logits=logits, bias=bias, weights=weights, chosen=chosen, logits_stride=logits.stride(0),
                bias_stride=0 if bias is None or bias.ndim == 1 else bias.stride(0), scaling=scaling, eps=eps,
            ),
            COUNT=count, K=k, SCORING=scoring, RENORMALISE=renormalise, BLOCK=power_of_two(count), num_warps=1,
            **early(logits),
        )  # fmt: skip
    return weights, chosen


@jit
def route_kernel(
    logits, bias, weights, chosen, logits_stride, bias_stride, scaling, eps,
    COUNT: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < COUNT
    scores = tl.load(logits + token * logits_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        tl.static_assert(SCORING == "sigmoid")
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranking = scores
    if bias is not None:
        ranking = ranking + tl.load(bias + token * bias_stride + expert, mask=real, other=0.0)
    rank = tl.where(real, tl.maximum(rising_key(ranking), LEAST_RANK + 1), LEAST_RANK)
    place = tl.full([BLOCK], K, tl.int32)
    for j in tl.static_range(K):
        # The first among equals; NaN has a rank as well.
        taken = tl.min(tl.where(rank == tl.max(rank, 0), expert, BLOCK), 0)
        place = tl.where(expert == taken, j, place)
        rank = tl.where(expert == taken, LEAST_RANK, rank)
    if RENORMALISE:
        scores = scores / (tl.sum(tl.where(place < K, scores, 0.0), 0) + eps)
    tl.store(weights + token * K + place, scores * scaling, mask=place < K)
    tl.store(chosen + token * K + place, expert, mask=place < K)


@dataclass(frozen=True, slots=True)
class Lists:
    """Pairs of every expert. An expert has at most one per token, so no list is longer than the number of tokens."""

    listed: Int[Tensor, "experts tokens"]  # in ascending order
    sizes: Int[Tensor, " experts"]
    places: Int[Tensor, "tokens k"]  # index of every pair in its expert's list
    tile_ends: Int[Tensor, " experts"] | None  # total tiles of all experts up to this one, if lists are cut


def list_pairs(chosen: Int[Tensor, "tokens k"], count: int, tile: int | None = None) -> Lists:
    """List the pairs of every expert. `tile`: cut lists into tiles of this number of pairs."""
    tokens, k = chosen.shape
    listed = torch.empty(count, tokens, dtype=torch.int32, device=chosen.device)
    sizes = torch.empty(count, dtype=torch.int32, device=chosen.device)
    places = torch.empty(tokens, k, dtype=torch.int32, device=chosen.device)
    block = next((block for block in LIST_BLOCKS if tokens * k <= block), LIST_BLOCKS[-1])
    list_kernel[(count,)](
        named(chosen=chosen, listed=listed, sizes=sizes, places=places, tokens=tokens, pairs=tokens * k),
        BLOCK=block, num_warps=max(1, min(16, block // 256)), **early(chosen),
    )  # fmt: skip
    tile_ends = None
    if tile is not None:
        tile_ends = torch.empty_like(sizes)
        block = power_of_two(count)
        tile_kernel[(1,)](
            named(sizes=sizes, tile_ends=tile_ends, tile=tile),
            COUNT=count, BLOCK=block, num_warps=1, **early(chosen),
        )  # fmt: skip
    return Lists(listed, sizes, places, tile_ends)


@jit(do_not_specialize=["tokens", "pairs"])
def list_kernel(chosen, listed, sizes, places, tokens, pairs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    expert = tl.program_id(0)
    ours = listed + expert.to(tl.int64) * tokens
    size = 0
    for begin in range(0, pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        match = tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert
        one = match.to(tl.int32)
        place = size + tl.cumsum(one, 0) - 1
        tl.store(ours + place, pair, mask=match)
        tl.store(places + pair, place, mask=match)
        size += tl.sum(one, 0)
    tl.store(sizes + expert, size)


@jit
def tile_kernel(sizes, tile_ends, tile, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    expert = tl.arange(0, BLOCK)
    size = tl.load(sizes + expert, mask=expert < COUNT, other=0)
    tl.store(tile_ends + expert, tl.cumsum((size + tile - 1) // tile, 0), mask=expert < COUNT)
