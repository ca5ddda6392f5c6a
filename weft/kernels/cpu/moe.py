"""Mixtures of experts: routing, and the experts' computation.

C++ serves few rows with weights in panels. Otherwise the host loops over the chosen experts: on a CPU it can read their
indices without waiting.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels import large_pages
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.linear import (
    as_rows,
    has_units_for,
    linear,
    multiplied,
    pack_many,
    prepared_as_stored,
    wide,
)
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.formats.rounded import NOTHING
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library as native
from weft.kernels.native import moe as kernels
from weft.kernels.native.calls import prefers_calls
from weft.kernels.native.layouts import DENSE_AND_PANELS, PANELS, StoredPanels, as_panels, panels_of
from weft.kernels.native.linear import pack as pack_panels
from weft.kernels.native.linear import product
from weft.kernels.plain import moe as plain
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

# Up to this number of rows of each expert on average, panels are faster than 16-bit units and than PyTorch's library.
FEW_EACH = {torch.bfloat16: 4, torch.float32: 64}

# Rows that the C++ kernel takes at a time: its memory grows with them.
MOST_MIXED = 512


def prepare_experts(layer: ExpertWeights, twice: bool, rounds: Set[str] = NOTHING) -> ExpertWeights:
    """Return the weights in panels; with 16-bit units, for which torch reads the checkpoint's layout, only a copy.

    `rounds`: what rows are rounded to, where formats have kernels for that.
    """
    return replace(layer, first=prepared(layer.first, twice, rounds), second=prepared(layer.second, twice, rounds))


def prepared(stored: Stored, twice: bool, rounds: Set[str]) -> Stored:
    matrices = stored.dense
    if matrices is None:
        return prepared_as_stored(stored, rounds)
    if has_units_for(matrices):
        if not twice or not native.available():
            return stored
        both = (matrices, pack_panels(matrices.detach(), large_pages.empty))
        return Stored(DENSE_AND_PANELS, both, stored.outputs, stored.inputs)
    packed = pack_many(matrices)
    return stored if packed is matrices else as_panels(stored, packed)


def score_experts(x: Normed, weight: Weight) -> Float[Tensor, "tokens experts"]:
    assert isinstance(x, Tensor)
    if weight.parts[0].format is PANELS:
        return product(as_rows(x), weight.parts[0].tensors[0], weight.outputs, dtype=torch.float32)
    return linear(x.float(), weight)


def route_softmax(logits: Float[Tensor, "tokens experts"], k: int, renormalise: bool) -> Routing:
    if are_few(logits):
        return kernels.route(logits, k, sigmoid=False, renormalise=renormalise)
    return plain.route_softmax(logits, k, renormalise)


def route_top(logits: Float[Tensor, "tokens experts"], k: int) -> Routing:
    return kernels.route(logits, k, sigmoid=False) if are_few(logits) else plain.route_top(logits, k)


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
    if are_few(logits):
        return kernels.route(logits, k, True, bias, groups, kept_groups, renormalise, scaling, eps)
    return plain.route_sigmoid(logits, k, bias, groups, kept_groups, renormalise, scaling, eps)


def are_few(rows: Float[Tensor, "n size"]) -> bool:
    """Return whether there are C++ kernels for these rows."""
    few = 0 < rows.shape[0] <= native.FEW_ROWS and rows.stride(1) == 1
    return few and rows.dtype in native.DTYPES and native.available()


def experts(
    x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
) -> Float[Tensor, "tokens hidden"]:
    assert isinstance(x, Tensor)
    alone = None if shared is None else linear(gated_product(shared.gate, shared.up, F.silu), shared.second)
    opening = None if shared is None else shared.opening
    if reads_panels(x, routing, layer):
        if x.shape[0] <= MOST_MIXED:
            return kernels.mix(x, routing, layer, alone, opening)
        pieces = zip(*(each.split(MOST_MIXED) for each in (x, *routing)))
        summed = torch.cat([kernels.mix(some, (weights, chosen), layer) for some, weights, chosen in pieces])
        return summed if alone is None else with_shared(summed, alone, opening)
    routed = routed_sum(x, routing, layer)
    return routed if alone is None else with_shared(routed, alone, opening)


def with_shared(routed: Tensor, alone: Tensor, opening: Tensor | None) -> Float[Tensor, "tokens hidden"]:
    """Return the experts' sum with what the shared expert adds."""
    return routed.add_(alone) if opening is None else torch.addcmul(routed, alone, opening.sigmoid())


def reads_panels(x: Tensor, routing: Routing, layer: ExpertWeights) -> bool:
    """Return whether to use the C++ kernel; 16-bit units are faster if experts have more than a few rows on average."""
    chosen = routing[1]
    matrices = layer.first, layer.second
    if any(isinstance(each.format, StoredPanels) for each in matrices):
        others = [each for each in matrices if not isinstance(each.format, StoredPanels)]
        return x.shape[0] > 0 and x.stride(1) == 1 and x.dtype in native.DTYPES and all(map(is_in_panels, others))
    if not (all(map(is_in_panels, matrices)) and are_few(x)):
        return False
    few = layer.first.format is PANELS or chosen.numel() <= FEW_EACH[x.dtype] * layer.first.experts
    return few or prefers_calls(x.shape[0])


def is_in_panels(stored: Stored) -> bool:
    return panels_of(stored) is not None


def routed_sum(x: Tensor, routing: Routing, layer: ExpertWeights) -> Float[Tensor, "tokens hidden"]:
    weights, chosen = routing
    first_bias, second_bias = layer.first_bias, layer.second_bias

    first, second = without_panels(layer.first), without_panels(layer.second)

    def expert(number: int, rows: Tensor) -> Tensor:
        if not 0 <= number < first.experts:
            return rows.new_zeros(rows.shape)
        first_shift = None if first_bias is None else first_bias[number]
        second_shift = None if second_bias is None else second_bias[number]
        inner = layer.activation(multiplied(rows, first.expert(number), first_shift))
        return multiplied(inner, second.expert(number), second_shift)

    weights = weights.to(x.dtype)
    if x.shape[0] == 1:
        alone = torch.cat([expert(number, x) for number in chosen[0].tolist()])
        return weighted_sum(weights, alone.unsqueeze(0))
    # Sort by expert, so that each sees its tokens side by side; restore the order before summing, which is always the
    # order of choice.
    order = chosen.flatten().argsort(stable=True)
    numbers, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    parts = x.index_select(0, order // chosen.shape[1]).split(counts.tolist())
    results = torch.empty(order.shape[0], x.shape[1], dtype=x.dtype)
    results[order] = torch.cat([expert(number, part) for number, part in zip(numbers.tolist(), parts)])
    return weighted_sum(weights, results.unflatten(0, chosen.shape))


def weighted_sum(
    weights: Float[Tensor, "tokens k"], results: Float[Tensor, "tokens k hidden"]
) -> Float[Tensor, "tokens hidden"]:
    """Return the sum of each token's results; by the same routine for one token, which has the same bits then."""
    return torch.bmm(wide(weights).unsqueeze(1), wide(results)).squeeze(1).to(results.dtype)


def without_panels(stored: Stored) -> Stored:
    """Return a matrix without the copy in panels, for many rows."""
    return Stored.of(stored.tensors[0]) if stored.format is DENSE_AND_PANELS else stored
