"""Decode-only steps (one new token per row): one call of a C++ kernel for each part of a layer."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView, RecurrentView
from weft.kernels.attention import AttentionInputs
from weft.kernels.cpu.linear import linear
from weft.kernels.cpu.ssd import gated
from weft.kernels.interface import Batch, DecodeSteps
from weft.kernels.native.attention import mix
from weft.kernels.native.causal_conv import convolve
from weft.kernels.native.channel_delta import channel_delta
from weft.kernels.native.gated_delta import gated_delta
from weft.kernels.native.replay import Compute, Replays
from weft.kernels.native.ssd import scan
from weft.kernels.recurrent import ConvolutionWeights, SsdInputs
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight

__all__ = ["attend", "causal_conv", "channel_delta", "gated_delta", "record_decodes", "short_conv", "ssd"]


def attend(
    inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "rows inner"] | None = None
) -> Float[Tensor, "rows inner"]:
    form = inputs.form
    heads = inputs.projected.unflatten(-1, (-1, form.head_dim))
    by_head = None if out is None else out.unflatten(-1, (-1, form.head_dim))
    reading = (batch, view, form.scale, form.softcap, inputs.sinks, form.gated, by_head)
    return mix(heads, form.heads, inputs.norm, form.norm_eps, inputs.rotation, *reading).flatten(-2)


def causal_conv(
    x: Float[Tensor, "rows channels"], weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "rows channels"]:
    return convolve(x, weights, batch, view)


def short_conv(
    x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
) -> Float[Tensor, "rows channels"]:
    return convolve(linear(x, projection), weights, batch, view, gated=True)


def record_decodes(compute: Compute) -> DecodeSteps:
    """Record decode-only steps once for each number of rows, and replay them without Python."""
    replays = Replays(compute)
    return DecodeSteps(replays, replays)


def ssd(
    inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Float[Tensor, "rows heads head_dim"] | None = None
) -> Float[Tensor, "rows heads head_dim"]:
    return gated(scan(inputs, batch, view), inputs.gate, out)
