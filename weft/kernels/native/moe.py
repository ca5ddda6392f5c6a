"""Mixtures of experts for few rows: the choice of experts, and the weighted sum of their outputs."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.experts import ExpertWeights, Routing
from weft.kernels.formats.stored import Stored
from weft.kernels.native.activation import ACTIVATIONS
from weft.kernels.native.calls import call, room, scratch
from weft.kernels.native.layouts import StoredPanels, panels_of
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.packing import PANEL
from weft.kernels.native.stored import BLOCK, panel_bytes

CHOICE, MIXTURE = Struct("5P11q2f"), Struct("11P19q2f")
# By the names of `Activation.name`; moe.cpp uses the same numbers.
EXPERT_ACTIVATIONS = (*ACTIVATIONS, "clamped_swiglu")
# Bytes to which work.h rounds up, and the most lanes of a vector.
BOUNDARY, LANES = 64, 16
# Of a row's block, rounded to integers.
ROW_BLOCK_BYTES = 48


def work_of_a_choice(experts: int, groups: int) -> int:
    """Return the bytes that moe_routing.cpp takes for a row: two arrays of scores, a group's strength, two orders."""
    scores = _rounded(4 * -(-experts // LANES) * LANES)
    return 2 * scores + _rounded(4 * groups) + _rounded(8 * experts) + _rounded(8 * max(groups, 2))


def work_of_experts(pairs: int, experts: int, hidden: int, outer: int, inner: int) -> int:
    """Return the bytes that moe.cpp takes: pairs of a row and an expert by expert, in blocks, and their values."""
    counts = _rounded(8 * (experts + 1)) + _rounded(24 * pairs) + _rounded(16 * pairs) + 2 * _rounded(8 * pairs)
    blocks = _rounded(ROW_BLOCK_BYTES * (pairs * max(hidden, inner) // BLOCK))
    return counts + sum(_rounded(4 * pairs * width) for width in (hidden, outer, inner)) + blocks


def _rounded(size: int) -> int:
    return -(-size // BOUNDARY) * BOUNDARY


def route(
    logits: Float[Tensor, "rows experts"],
    k: int,
    sigmoid: bool,
    bias: Float[Tensor, " experts"] | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
    eps: float = 0.0,
) -> Routing:
    """Choose the k best experts of each row, best first; of equal ones, the one with the lowest number."""
    rows, experts = logits.shape
    assert 0 < k <= experts, (k, experts)
    assert experts % groups == 0, (experts, groups)
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    weights, chosen = room((rows, k), torch.float32), room((rows, k), torch.int64)
    row_work = work_of_a_choice(experts, groups)
    work = scratch(rows * row_work // 4)
    values = CHOICE.pack(
        logits.data_ptr(), address(bias), weights.data_ptr(), chosen.data_ptr(), work.data_ptr(),
        rows, logits.stride(0), experts, k, groups, kept_groups, sigmoid, renormalise,
        DTYPES[logits.dtype], torch.get_num_threads(), row_work, scaling, eps,
    )  # fmt: skip
    call("weft_route", values)
    return weights, chosen


def operand(matrices: Stored) -> tuple[Tensor, int, tuple[int, int, int]]:
    """Return panels of all experts, their kind, and what else the kernel must know of a stored format."""
    panels = panels_of(matrices)
    if panels is not None:
        assert panels.shape[2:] == (matrices.inputs, PANEL), (panels.shape, matrices.inputs)
        return panels, DTYPES[panels.dtype], (0, 0, 0)
    layout, [panels] = matrices.format, matrices.tensors
    assert isinstance(layout, StoredPanels)
    assert panels.shape[2] == panel_bytes(layout, matrices.inputs), (panels.shape, matrices.inputs)
    return panels, layout.kind, (panels.shape[2], layout.columns, int(layout.are_rounded))


def mix(
    x: Float[Tensor, "rows hidden"],
    routing: Routing,
    layer: ExpertWeights,
    shared: Float[Tensor, "rows hidden"] | None = None,
    opening: Float[Tensor, "rows 1"] | None = None,
) -> Float[Tensor, "rows hidden"]:
    """Return the weighted sum of the chosen experts, plus `shared` times the sigmoid of `opening`.

    The layer's weights are in panels, [experts, panels, inputs, 32], or in those of a stored format. All other operands
    but the routing have the dtype of x.
    """
    weights, chosen = (each.contiguous() for each in routing)
    first, first_kind, first_stored = operand(layer.first)
    second, second_kind, second_stored = operand(layer.second)
    (rows, hidden), k, activation = x.shape, chosen.shape[1], layer.activation
    experts, inner = len(second), layer.second.inputs
    assert first.shape[:2] == (experts, -(-inner * activation.parts // PANEL)), (first.shape, x.shape)
    assert layer.first.inputs == hidden, (layer.first.inputs, x.shape)
    assert second.shape[1] == -(-hidden // PANEL), (second.shape, x.shape)
    assert weights.dtype == torch.float32
    assert chosen.dtype == torch.int64
    others = (weights, chosen, first, second, layer.first_bias, layer.second_bias, shared)
    assert all(each is None or each.is_contiguous() for each in others)
    assert all(each is None or each.dtype == x.dtype for each in (*others[4:], opening))
    y = room((rows, hidden), x.dtype)
    work = scratch(work_of_experts(rows * k, experts, hidden, inner * activation.parts, inner) // 4)
    values = MIXTURE.pack(
        x.data_ptr(), weights.data_ptr(), chosen.data_ptr(), first.data_ptr(), address(layer.first_bias),
        second.data_ptr(), address(layer.second_bias), address(shared), address(opening), y.data_ptr(),
        work.data_ptr(),
        rows, x.stride(0), k, experts, hidden, inner, activation.parts, EXPERT_ACTIVATIONS.index(activation.name),
        0 if opening is None else opening.stride(0), DTYPES[x.dtype], first_kind, second_kind,
        torch.get_num_threads(), *first_stored, *second_stored, activation.alpha, activation.limit,
    )  # fmt: skip
    call("weft_experts", values)
    return y
