"""Mixtures of experts: routing, and the experts' computation.

The host loops over the chosen experts: on a CPU it can read their indices without waiting.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.linear import linear, pack_many, wide
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.plain.moe import route_sigmoid, route_softmax, route_top
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = ["experts", "prepare_experts", "route_sigmoid", "route_softmax", "route_top"]


def prepare_experts(matrices: Float[Tensor, "experts outputs inputs"]) -> Float[Tensor, "experts ..."]:
    return pack_many(matrices)


def experts(
    x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
) -> Float[Tensor, "tokens hidden"]:
    assert isinstance(x, Tensor)
    routed = routed_sum(x, routing, layer)
    if shared is None:
        return routed
    alone = linear(gated_product(shared.gate, shared.up, F.silu), shared.second)
    if shared.opening is None:
        return routed.add_(alone)
    return torch.addcmul(routed, alone, shared.opening.sigmoid())


def routed_sum(x: Tensor, routing: Routing, layer: ExpertWeights) -> Float[Tensor, "tokens hidden"]:
    weights, chosen = routing
    first_bias, second_bias = layer.first_bias, layer.second_bias

    hidden, inner = x.shape[1], layer.second.shape[2]

    def expert(number: int, rows: Tensor) -> Tensor:
        first_shift = None if first_bias is None else first_bias[number]
        second_shift = None if second_bias is None else second_bias[number]
        first = Weight(layer.first[number], first_shift, size=inner * layer.activation.parts)
        second = Weight(layer.second[number], second_shift, size=hidden)
        return linear(layer.activation(linear(rows, first)), second)

    weights = weights.to(x.dtype)
    if x.shape[0] == 1:
        return (wide(weights) @ wide(torch.cat([expert(number, x) for number in chosen[0].tolist()]))).to(x.dtype)
    # Sort by expert, so that each sees its tokens side by side; restore the order before summing, which is always the
    # order of choice.
    order = chosen.flatten().argsort(stable=True)
    numbers, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    parts = x.index_select(0, order // chosen.shape[1]).split(counts.tolist())
    results = torch.empty(order.shape[0], x.shape[1], dtype=x.dtype)
    results[order] = torch.cat([expert(number, part) for number, part in zip(numbers.tolist(), parts)])
    by_token = wide(results).unflatten(0, chosen.shape)
    return torch.bmm(wide(weights).unsqueeze(1), by_token).squeeze(1).to(x.dtype)
