"""Mixtures of experts: who goes where, and the experts' own work.

Routers return (weights, chosen), both [tokens, k]. The reference walks over the experts that were chosen, so it needs
their numbers on the host: on a CPU they are there already. On a GPU nobody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.activation import KERNELS, gated_product
from weft.kernels.linear import linear
from weft.kernels.stream import Normed, whole

Routing = tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that sees every token, as far as its first product: the second may be done along with the others'."""

    gate: Float[Tensor, "tokens inner"]
    up: Float[Tensor, "tokens inner"]
    second: Float[Tensor, "hidden inner"]
    opening: Float[Tensor, "tokens 1"] | None  # what its weight is the sigmoid of; none: its weight is 1

    def outcome(self) -> Tensor:
        return linear(gated_product(self.gate, self.up, F.silu), self.second)


def route_softmax(logits: Float[Tensor, "tokens experts"], k: int, renormalise: bool) -> Routing:
    """Probabilities over all experts; the k likeliest, made to sum to 1 again if asked (Qwen)."""
    if logits.is_cuda:
        from weft.kernels.cuda.moe_routing import route

        return route(logits, k, "softmax", renormalise=renormalise)
    weights, chosen = logits.float().softmax(-1).topk(k, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def route_top(logits: Float[Tensor, "tokens experts"], k: int) -> Routing:
    """Probabilities over the k best only (gpt-oss, Granite). Equals `route_softmax` with renormalisation."""
    if logits.is_cuda:
        return route_softmax(logits, k, renormalise=True)
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
    """Independent scores; `bias` has a say in who is chosen, not in how much they weigh (LFM2-MoE, Nemotron-H).

    With several groups only experts of the `kept_groups` groups whose best two score highest can be chosen.
    """
    # Groups are rare: then torch's own operations do.
    if logits.is_cuda and groups <= kept_groups:
        from weft.kernels.cuda.moe_routing import route

        return route(logits, k, "sigmoid", bias, renormalise, scaling, eps)
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
    grouped = ranking.unflatten(-1, (groups, -1))
    strength = grouped.topk(2, -1).values.sum(-1)
    out = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, strength.topk(kept, -1).indices, False)
    return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between an expert's two products."""

    name: str  # what a kernel calls it
    function: Callable[[Tensor], Tensor]  # of the first product's outcome
    parts: int  # 2: that outcome holds gates and what they gate, side by side
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def plain(function: Callable[[Tensor], Tensor]) -> Activation:
    return Activation(KERNELS[function], function, parts=1)


def gated(function: Callable[[Tensor], Tensor]) -> Activation:
    """For experts whose first product holds a gate and an up part, side by side."""

    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate).mul_(up)

    return Activation(KERNELS[function], apply, parts=2)


def clamped(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """gpt-oss: a gate that saturates, and an up part that is centred at one."""
    return Activation("clamped_swiglu", partial(clamped_swiglu, alpha=alpha, limit=limit), 2, alpha, limit)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def experts(
    x: Normed,
    weights: Float[Tensor, "tokens k"],
    chosen: Int[Tensor, "tokens k"],
    first: Float[Tensor, "experts outer hidden"],
    second: Float[Tensor, "experts hidden inner"],
    activation: Activation,
    first_bias: Float[Tensor, "experts outer"] | None = None,
    second_bias: Float[Tensor, "experts hidden"] | None = None,
    shared: Shared | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """The weighted sum of the chosen experts: second(activation(first(x))); and a shared one, if there is one."""
    x = whole(x)
    if x.is_cuda:
        from weft.kernels.cuda import moe

        return moe.experts(x, weights, chosen, first, second, activation, first_bias, second_bias, shared)
    routed = _routed(x, weights, chosen, first, second, activation, first_bias, second_bias)
    if shared is None:
        return routed
    if shared.opening is None:
        return routed.add_(shared.outcome())
    return torch.addcmul(routed, shared.outcome(), shared.opening.sigmoid())


def _routed(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
) -> Tensor:
    def expert(number: int, rows: Tensor) -> Tensor:
        inner = linear(rows, first[number], None if first_bias is None else first_bias[number])
        return linear(activation(inner), second[number], None if second_bias is None else second_bias[number])

    weights = weights.to(x.dtype)
    if x.shape[0] == 1:
        return weights @ torch.cat([expert(number, x) for number in chosen[0].tolist()])
    # Sorted by expert, so that each sees its tokens side by side; put back in their places before they are added up,
    # always in the order of choice.
    order = chosen.flatten().argsort(stable=True)
    numbers, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    parts = x.index_select(0, order // chosen.shape[1]).split(counts.tolist())
    outcome = torch.empty(order.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    outcome[order] = torch.cat([expert(number, part) for number, part in zip(numbers.tolist(), parts)])
    return torch.bmm(weights.unsqueeze(1), outcome.unflatten(0, chosen.shape)).squeeze(1)
