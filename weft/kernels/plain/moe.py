"""Mixtures of experts: routing, and the experts' computation."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.formats.rounded import NOTHING
from weft.kernels.plain.linear import linear, prepared
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight


def prepare_experts(layer: ExpertWeights, twice: bool, rounds: Set[str] = NOTHING) -> ExpertWeights:
    return replace(layer, first=prepared(layer.first, rounds), second=prepared(layer.second, rounds))


def score_experts(x: Normed, weight: Weight) -> Float[Tensor, "tokens experts"]:
    assert isinstance(x, Tensor)
    return linear(x.float(), weight)


def route_softmax(logits: Float[Tensor, "tokens experts"], k: int, renormalise: bool) -> Routing:
    weights, chosen = logits.float().softmax(-1).topk(k, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def route_top(logits: Float[Tensor, "tokens experts"], k: int) -> Routing:
    best, chosen = logits.float().topk(k, -1)
    return best.softmax(-1), chosen


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
    scores = logits.float().sigmoid()
    ranking = scores if bias is None else scores + bias
    if groups > kept_groups:
        ranking = _only_best_groups(ranking, groups, kept_groups)
    chosen = ranking.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scaling, chosen


def _only_best_groups(ranking: Tensor, groups: int, kept: int) -> Tensor:
    grouped: Tensor = ranking.unflatten(-1, (groups, -1))
    strength = grouped.topk(2, -1).values.sum(-1)
    out = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, strength.topk(kept, -1).indices, False)
    return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(-2)


def experts(
    x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
) -> Float[Tensor, "tokens hidden"]:
    assert isinstance(x, Tensor)
    return mixture(x, routing, layer, shared, linear)


def mixture(
    x: Float[Tensor, "tokens hidden"],
    routing: Routing,
    layer: ExpertWeights,
    shared: SharedExpert | None,
    linear: Callable[[Tensor, Weight], Tensor],
) -> Float[Tensor, "tokens hidden"]:
    """Compute every token with every expert, so that the host need not read the device's routing."""
    weights, chosen = routing
    y = torch.zeros_like(x, dtype=torch.float32)
    for number in range(layer.first.experts):
        mine = chosen == number
        weight = (weights * mine).sum(-1, keepdim=True)
        # An expert may overflow on tokens that did not choose it: drop its result, do not multiply it by zero.
        y += torch.where(mine.any(-1, keepdim=True), weight * expert(x, number, layer, linear), 0.0)
    y = y.to(x.dtype)
    if shared is None:
        return y
    alone = linear(F.silu(shared.gate) * shared.up, shared.second)
    return y + (alone if shared.opening is None else alone * shared.opening.sigmoid())


def expert(
    x: Float[Tensor, "tokens hidden"], number: int, layer: ExpertWeights, linear: Callable[[Tensor, Weight], Tensor]
) -> Float[Tensor, "tokens hidden"]:
    first_bias, second_bias = (None if bias is None else bias[number] for bias in (layer.first_bias, layer.second_bias))
    inner = layer.activation(linear(x, Weight((layer.first.expert(number),), first_bias)))
    return linear(inner, Weight((layer.second.expert(number),), second_bias))
