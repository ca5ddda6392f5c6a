"""Weights of a causal depthwise convolution over time. Its mixer declares its memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ConvolutionWeights
from weft.kernels.stream import Normed
from weft.models.layers.linear import Linear, parent_of
from weft.models.model import Layer, Source
from weft.models.sharding import RankCut


class CausalConv(Layer):
    """Convolution with one filter of `width` taps per channel, then SiLU if `activation`.

    A checkpoint may store it whole, or in `parts` that are siblings of this module.
    """

    def __init__(
        self, channels: int | RankCut, width: int, bias: bool, activation: bool, parts: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        assert not (parts and bias)
        self.parts = parts
        self.cut = RankCut.whole(channels)
        kept = self.cut.kept
        # Sums are float32, so the taps are too. They lie by channel, like a token's inputs.
        self.taps = nn.Parameter(torch.empty(width, kept, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(kept, dtype=torch.float32), requires_grad=False) if bias else None
        self.activation = activation

    def forward(
        self, x: Float[Tensor, "tokens channels"], batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens channels"]:
        return batch.operations.causal_conv(x, self.weights, batch, view)

    @property
    def weights(self) -> ConvolutionWeights:
        return ConvolutionWeights(self.taps.t(), self.bias, self.activation)

    def gated(
        self, x: Normed, projection: Linear, batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens channels"]:
        """Convolve a projection that holds an input gate, an output gate and then the input."""
        return batch.operations.short_conv(x, projection.weights, self.weights, batch, view)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        # Checkpoints keep the middle dimension of a one-dimensional convolution: input channels per group.
        whole = self.taps.t().unsqueeze(1)
        yield Source(prefix + "weight", whole, cut=self.cut)
        if self.parts:
            first, *others = (f"{parent_of(prefix)}{name}.weight" for name in self.parts)
            yield Source(first, whole, concatenate, companions=tuple(others), concatenated=True, cut=self.cut)
        if self.bias is not None:
            yield Source(prefix + "bias", self.bias, cut=self.cut)

    def initialise(self, generator: torch.Generator) -> None:
        self.taps.normal_(0.0, 0.5, generator=generator)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.1, generator=generator)


def concatenate(*parts: Tensor) -> Tensor:
    return torch.cat(parts)
