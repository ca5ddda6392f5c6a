"""Inputs of the recurrent operations, and the part of their memory that does not depend on a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from weft.kernels.states import state_parts
from weft.memory.spec import Part, RecurrentMemory

# Bounds of an unlimited time step.
UNLIMITED = (0.0, math.inf)


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Causal depthwise convolution: one filter per channel, oldest tap first, then SiLU if `activation`."""

    taps: Float[Tensor, "channels width"]  # fastest as the transpose of a contiguous [width, channels]
    bias: Float[Tensor, " channels"] | None = None
    activation: bool = False


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """Inputs of a Mamba2 layer's scan.

    `A` is negative. With `dt_bias`, the time step is softplus(dt + dt_bias) within `limit`; without, it is `dt`,
    which is positive. With `gate`, the output is silu(gate) * y.
    """

    x: Float[Tensor, "tokens heads head_dim"]
    dt: Float[Tensor, "tokens heads"]
    A: Float[Tensor, " heads"]
    B: Float[Tensor, "tokens groups state"]
    C: Float[Tensor, "tokens groups state"]
    D: Float[Tensor, " heads"] | None = None
    dt_bias: Float[Tensor, " heads"] | None = None
    limit: tuple[float, float] = UNLIMITED
    gate: Float[Tensor, "tokens inner"] | None = None


@dataclass(frozen=True, slots=True)
class SsdShape:
    """Sizes of a Mamba2 layer that determine its memory."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_channels: int
    conv_width: int
    stored: str = "float32"  # data type of states


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of a gated delta layer: q and k as projected, and the decay and strength of each token.

    With `rates` and `bias`, the log decay is rates * softplus(step + bias) and the rate of correction is `most` *
    sigmoid(strength). Without them, `step` is the log decay (not positive) and `strength` the rate.
    """

    q: Float[Tensor, "tokens key_heads key_dim"]
    k: Float[Tensor, "tokens key_heads key_dim"]
    v: Float[Tensor, "tokens value_heads value_dim"]
    step: Float[Tensor, "tokens value_heads"]
    strength: Float[Tensor, "tokens value_heads"]
    rates: Float[Tensor, " value_heads"] | None = None
    bias: Float[Tensor, " value_heads"] | None = None
    most: float = 1.0


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a gated delta layer that determine its memory."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_channels: int
    conv_width: int
    stored: str = "float32"  # data type of states


@dataclass(frozen=True, slots=True)
class ChannelDeltaInputs:
    """Inputs of a delta layer that decays each channel of a key on its own (Kimi Linear).

    With `rates` and `bias`, the log decay is rates * softplus(step + bias) and the rate of correction is
    sigmoid(strength). Without them, `step` is the log decay (not positive) and `strength` the rate.
    """

    q: Float[Tensor, "tokens heads key_dim"]
    k: Float[Tensor, "tokens heads key_dim"]
    v: Float[Tensor, "tokens heads value_dim"]
    step: Float[Tensor, "tokens heads key_dim"]
    strength: Float[Tensor, "tokens heads"]
    rates: Float[Tensor, " heads"] | None = None
    bias: Float[Tensor, "heads key_dim"] | None = None


@dataclass(frozen=True, slots=True)
class ChannelDeltaShape:
    """Sizes of a delta layer with decays by channel that determine its memory."""

    heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int
    stored: str = "float32"  # data type of states


def conv_parts(channels: int, width: int, dtype: str) -> tuple[Part, Part]:
    """Return a convolution's memory: a state holds the last width - 1 inputs, a tail the input of each token."""
    return Part("conv", (width - 1, channels), dtype), Part("conv", (channels,), dtype)


def short_conv_memory(channels: int, width: int, dtype: str) -> RecurrentMemory:
    """Return the memory of a layer that is only a convolution."""
    state, tail = conv_parts(channels, width, dtype)
    return RecurrentMemory((state,), (tail,), width)


def ssd_state(shape: SsdShape) -> tuple[Part, ...]:
    """Return the state of a scan. It lies by group, so that reading it is one matmul of C with contiguous memory."""
    width = shape.heads // shape.groups * shape.head_dim
    return state_parts("ssm", (shape.groups, shape.state, width), shape.stored)


def delta_state(shape: DeltaShape) -> tuple[Part, ...]:
    return state_parts("delta", (shape.value_heads, shape.key_dim, shape.value_dim), shape.stored)


def channel_delta_state(shape: ChannelDeltaShape) -> tuple[Part, ...]:
    return state_parts("channel_delta", (shape.heads, shape.key_dim, shape.value_dim), shape.stored)
