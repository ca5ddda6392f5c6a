"""Rotary position embeddings: frequencies of every published variant.

Frequencies depend on the configuration, angles on the step. So cosines and sines are computed once per step and
configuration and shared by all layers. Pairs are (i, i + half), the layout of published checkpoints.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RotaryKind:
    """Everything that angles depend on, besides the position.

    `dynamic` scaling changes nothing within the trained context, which sequences of such a model must not exceed, so
    it equals `default`. Fields that a variant does not use keep their defaults.
    """

    size: int  # number of rotated dimensions per head
    theta: float = 10000.0
    variant: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_frequency: float = 1.0  # llama3
    high_frequency: float = 4.0  # llama3
    fast: float = 32.0  # yarn
    slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: derived from `factor`

    def __post_init__(self) -> None:
        assert self.variant in VARIANTS, self.variant
        assert self.size % 2 == 0, self.size


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of a step's positions; the first half of `sine` is negative."""

    cosine: Float[Tensor, "tokens 1 size"]
    sine: Float[Tensor, "tokens 1 size"]


def frequencies(kind: RotaryKind) -> Float[Tensor, " half"]:
    """Return the radians per token of each pair of dimensions."""
    # Arithmetic on the meta device, where shapes are checked, would import a compiler and Triton.
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
        return _frequencies(kind)


def _frequencies(kind: RotaryKind) -> Tensor:
    turns = kind.theta ** (torch.arange(0, kind.size, 2, dtype=torch.float32) / kind.size)
    plain = 1.0 / turns
    if kind.variant == "linear":
        return plain / kind.factor
    if kind.variant == "llama3":
        return _llama3(kind, plain)
    if kind.variant == "yarn":
        return _yarn(kind, plain)
    return plain


def amplitude(kind: RotaryKind) -> float:
    """Return the factor of cosines and sines: 1, except for yarn."""
    if kind.variant != "yarn":
        return 1.0
    if kind.attention_factor is not None:
        return kind.attention_factor
    return yarn_scale(kind.factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(kind: RotaryKind, plain: Tensor) -> Tensor:
    """Stretch slow pairs by `factor`, keep fast ones, and blend those between."""
    turns_in_context = kind.original_context * plain / (2 * math.pi)
    blend = (turns_in_context - kind.low_frequency) / (kind.high_frequency - kind.low_frequency)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / kind.factor + blend * plain


def _yarn(kind: RotaryKind, plain: Tensor) -> Tensor:
    """Stretch pairs like llama3, but with a ramp linear in the index of the pair."""

    def index_of(turns: float) -> float:
        """Return the (fractional) pair that makes this number of turns in the original context."""
        return kind.size * math.log(kind.original_context / (turns * 2 * math.pi)) / (2 * math.log(kind.theta))

    low, high = index_of(kind.fast), index_of(kind.slow)
    if kind.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, kind.size - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(kind.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched * plain / kind.factor + (1 - stretched) * plain
