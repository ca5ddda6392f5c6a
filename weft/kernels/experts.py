"""Inputs of the mixture-of-experts operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.activations import NAMES
from weft.kernels.formats.stored import Stored
from weft.kernels.weight import Weight

# Weights and indices of the chosen experts, both [tokens, k]. On CPUs, an index that is not one of the layer's experts
# stands for an expert of another rank, which adds nothing here.
Routing: TypeAlias = tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of all experts of a layer: second(activation(first(x))).

    They are in a checkpoint's format, or in one that `Operations.prepare_experts` chose.
    """

    first: Stored
    second: Stored
    activation: Activation
    first_bias: Float[Tensor, "experts outer"] | None = None
    second_bias: Float[Tensor, "experts hidden"] | None = None

    @staticmethod
    def of(
        first: Float[Tensor, "experts outer hidden"],
        second: Float[Tensor, "experts hidden inner"],
        activation: Activation,
        first_bias: Float[Tensor, "experts outer"] | None = None,
        second_bias: Float[Tensor, "experts hidden"] | None = None,
    ) -> ExpertWeights:
        """Return weights of plain numbers."""
        return ExpertWeights(Stored.of(first), Stored.of(second), activation, first_bias, second_bias)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A shared expert, which sees every token, after its first matmul. The second may run with the other experts'."""

    gate: Float[Tensor, "tokens inner"]
    up: Float[Tensor, "tokens inner"]
    second: Weight
    opening: Float[Tensor, "tokens 1"] | None  # its weight is the sigmoid of this; None: its weight is 1


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between an expert's two matmuls."""

    name: str  # its name in kernels
    function: Callable[[Tensor], Tensor]  # of the first matmul's output
    parts: int  # 2: that output holds gates and gated values, side by side
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def plain(function: Callable[[Tensor], Tensor]) -> Activation:
    return Activation(NAMES[function], function, parts=1)


def gated(function: Callable[[Tensor], Tensor]) -> Activation:
    """Return the activation of experts whose first matmul holds gate and up, side by side: function(gate) * up."""

    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate).mul_(up)

    return Activation(NAMES[function], apply, parts=2)


def clamped(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """Return gpt-oss's activation: a gate that saturates, and an up part centred at one."""
    return Activation("clamped_swiglu", partial(clamped_swiglu, alpha=alpha, limit=limit), 2, alpha, limit)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
