"""Experts whose bits do not depend on how many tokens chose them: every matmul is one sum over its inputs, in order.

A pair's outputs have the same bits alone, in a tile of any size, and in torch's grouped matmul. Matmuls are rounded
where torch rounds them, before biases and activations, and a token's choices are added in their order.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from weft.kernels.cuda.launch.gpus import HOPPER, gpu_of
from weft.kernels.cuda.linear.exact import linear, shares_of
from weft.kernels.cuda.linear.tiles import float32_scores
from weft.kernels.cuda.moe import prepare_experts, route_softmax, route_top
from weft.kernels.cuda.moe.choices import FEW_PAIRS, TILED_TOKENS, WHOLE_TOKENS, tiles
from weft.kernels.cuda.moe.exact_few import few_experts
from weft.kernels.cuda.moe.many import can_group, many_experts
from weft.kernels.cuda.moe.routing import list_pairs, route
from weft.kernels.cuda.moe.some import multiply
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.cuda.norm.exact import rows_of
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = [
    "experts",
    "prepare_experts",
    "route_sigmoid",
    "route_softmax",
    "route_top",
    "score_experts",
]


def score_experts(x: Normed, weight: Weight) -> Float[Tensor, "tokens experts"]:
    assert weight.matrix is not None, "routers are never quantised"
    scores = float32_scores(rows_of(x), weight.matrix)
    return scores if weight.bias is None else scores + weight.bias


def route_sigmoid(
    logits: Float[Tensor, "tokens experts"],
    k: int,
    bias: Float[Tensor, " experts"] | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
    eps: float = 1e-20,
) -> Routing:
    if groups > kept_groups:
        excluded = ~in_best_groups(logits, bias, groups, kept_groups)
        added = torch.zeros_like(logits, dtype=torch.float32) if bias is None else bias.expand(logits.shape)
        return route(logits, k, "sigmoid", added.masked_fill(excluded, -torch.inf), renormalise, scaling, eps)
    return route(logits, k, "sigmoid", bias, renormalise, scaling, eps)


def in_best_groups(
    logits: Float[Tensor, "tokens experts"], bias: Float[Tensor, " experts"] | None, groups: int, kept: int
) -> Bool[Tensor, "tokens experts"]:
    """Return whether an expert is in a group whose best two score highest.

    Maxima do not depend on the order in which they are found, unlike a sort's choice among equals.
    """
    scores = logits.float().sigmoid()
    grouped = (scores if bias is None else scores + bias).unflatten(-1, (groups, -1))
    best, where = grouped.max(-1, keepdim=True)
    second = grouped.scatter(-1, where, -torch.inf).amax(-1)
    strength = best.squeeze(-1) + second
    is_kept = torch.zeros_like(strength, dtype=torch.bool)
    for _ in range(kept):
        left = strength.masked_fill(is_kept, -torch.inf)
        equal = (left == left.amax(-1, keepdim=True)) & ~is_kept
        # The first among equals.
        is_kept = is_kept | (equal & (equal.cumsum(-1) == 1))
    return is_kept.unsqueeze(-1).expand_as(grouped).flatten(-2)


def experts(
    x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
) -> Float[Tensor, "tokens hidden"]:
    x = rows_of(x).contiguous()
    weights, chosen = (part.contiguous() for part in routing)
    tokens = len(chosen)
    if not tokens:
        return x.new_empty(x.shape)
    first, second = layer.first.dense, layer.second.dense
    if first is None or second is None or (shared is not None and shared.second.matrix is None):
        return stored_experts(x, (weights, chosen), layer, shared, exact=True)
    if tokens > TILED_TOKENS and is_grouped_in_order(first, second):
        return many_experts(
            x, weights, chosen, first, second, layer.activation, layer.first_bias, layer.second_bias,
            shared, linear,
        )  # fmt: skip
    if is_for_few(tokens, routing[0].shape[1], layer, shared):
        return few_experts(x, weights, chosen, layer, shared)
    results = pair_results(x, chosen, layer)
    return weighted_sum(results, weights, shared, None, chosen, layer.second_bias, linear)


def is_grouped_in_order(first: Tensor, second: Tensor) -> bool:
    """Return whether torch's grouped matmul supports these experts and was seen to keep sums whole."""
    return can_group(first, second) and gpu_of(first.device).capability == HOPPER


def is_for_few(tokens: int, k: int, layer: ExpertWeights, shared: SharedExpert | None) -> bool:
    """Return whether pairs are computed alone, with a shared expert whose sums are whole."""
    whole = shared is None or shares_of(shared.second.outputs, shared.second.inputs) == 1
    return whole and (tokens == 1 or tokens * k <= FEW_PAIRS * layer.second.experts)


def pair_results(x: Tensor, chosen: Tensor, layer: ExpertWeights) -> Float[Tensor, "pairs hidden"]:
    """Return the outputs of every pair's expert, without the second bias."""
    first, second = layer.first.dense, layer.second.dense
    assert first is not None
    assert second is not None
    (tokens, k), (count, hidden, inner) = chosen.shape, second.shape
    blocks = tiles(x.dtype, tokens, k, count)
    lists = list_pairs(chosen, count, blocks[0].pairs if tokens > WHOLE_TOKENS else None)
    between_them = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    results = torch.empty(tokens * k, hidden, dtype=x.dtype, device=x.device)
    kind = layer.activation
    multiply(
        x, k, chosen, lists, first, layer.first_bias, between_them, blocks[0],
        kind.name, kind.parts, (kind.alpha, kind.limit), rounded=True,
    )  # fmt: skip
    multiply(between_them, 1, chosen, lists, second, None, results, blocks[1])
    return results
