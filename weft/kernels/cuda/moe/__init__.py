"""Experts on a GPU, by the fastest method for the number of tokens. Nothing here reads from the device.

The choice of experts decides which memory is read, never the shape of a launch, so a recorded step can be replayed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.formats.lines import prepared
from weft.kernels.cuda.moe.choices import FEW_PAIRS, TILED_TOKENS, WHOLE_TOKENS, tiles, vectors
from weft.kernels.cuda.moe.few import few_experts
from weft.kernels.cuda.moe.many import can_group, many_experts
from weft.kernels.cuda.moe.packed import can_pack
from weft.kernels.cuda.moe.routing import route
from weft.kernels.cuda.moe.some import some_experts
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.cuda.norm import rows_of
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.formats.rounded import NOTHING
from weft.kernels.plain import moe as plain
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight


def prepare_experts(layer: ExpertWeights, twice: bool, rounds: Set[str] = NOTHING) -> ExpertWeights:
    """Return experts with their codes in the order in which kernels read them, if both matrices allow that.

    `rounds`: what rows are rounded to, in any case.
    """
    found = replace(layer, first=prepared(layer.first, rounds), second=prepared(layer.second, rounds))
    return found if can_pack(found) else plain.prepare_experts(layer, twice, rounds)


def score_experts(x: Normed, weight: Weight) -> Float[Tensor, "tokens experts"]:
    return plain.score_experts(rows_of(x), weight)


def route_softmax(logits: Float[Tensor, "tokens experts"], k: int, renormalise: bool) -> Routing:
    return route(logits, k, "softmax", renormalise=renormalise)


def route_top(logits: Float[Tensor, "tokens experts"], k: int) -> Routing:
    """Choose the k best experts by calling `route_softmax` with renormalisation, which is equivalent."""
    return route(logits, k, "softmax", renormalise=True)


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
    # Groups are rare, so torch's operations serve.
    if groups > kept_groups:
        return plain.route_sigmoid(logits, k, bias, groups, kept_groups, renormalise, scaling, eps)
    return route(logits, k, "sigmoid", bias, renormalise, scaling, eps)


def experts(
    x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
) -> Float[Tensor, "tokens hidden"]:
    x = rows_of(x).contiguous()
    weights, chosen = (part.contiguous() for part in routing)
    first, second = layer.first.dense, layer.second.dense
    if first is None or second is None or (shared is not None and shared.second.matrix is None):
        return stored_experts(x, (weights, chosen), layer, shared)
    inputs = (x, weights, chosen, first, second, layer.activation, layer.first_bias, layer.second_bias, shared)
    (tokens, k), (count, hidden, inner) = chosen.shape, second.shape
    if not tokens:
        return x.new_empty(x.shape)
    if tokens == 1 or tokens * k <= FEW_PAIRS * count:
        return few_experts(*inputs, vectors(hidden, inner, k))
    if tokens > TILED_TOKENS and can_group(first, second):
        return many_experts(*inputs)
    return some_experts(*inputs, tiles(x.dtype, tokens, k, count), tiled=tokens > WHOLE_TOKENS)
