"""The gated short convolution of LFM2: its only memory is the width - 1 inputs before the next token."""

from __future__ import annotations

import torch

from weft.device.store import RecurrentView, View
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import short_conv_memory
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Addend, Normed
from weft.memory.spec import Memory
from weft.models.layers.attention import DTYPE_NAMES
from weft.models.layers.causal_conv import CausalConv
from weft.models.layers.linear import Linear, OutputLinear
from weft.models.model import Mixer
from weft.models.sharding import current_shard, side_by_side


class ShortConv(Mixer):
    """Mixer that computes y = out(C * conv(B * x)), where B, C and x are projections of the input."""

    def __init__(self, hidden: int, width: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        channels = current_shard().cut(hidden, "convolution channels")
        self.in_proj = Linear(hidden, side_by_side(channels, channels, channels), bias)
        self.conv = CausalConv(channels, width, bias, activation=False)
        self.out_proj = OutputLinear(channels, hidden, bias)
        self.sizes = (channels.kept, width, DTYPE_NAMES[dtype])

    def memory(self, operations: Operations) -> Memory:
        return short_conv_memory(*self.sizes)

    def forward(
        self,
        x: Normed,
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
    ) -> Addend:
        view = views[self.index]
        assert isinstance(view, RecurrentView)
        return self.out_proj.forward(self.conv.gated(x, self.in_proj, batch, view), batch)
