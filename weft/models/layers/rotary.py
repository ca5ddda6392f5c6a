"""Rotary embedding as a layer: called once per step; all mixers that use it share the result."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.interface import Batch
from weft.kernels.rotary import RotaryKind, Rotation, amplitude, frequencies
from weft.models.model import Layer


class Rotary(Layer):
    frequency: Tensor

    def __init__(self, kind: RotaryKind, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("frequency", frequencies(kind), persistent=False)
        self.scale = amplitude(kind)
        self.dtype = dtype

    def forward(self, batch: Batch) -> Rotation:
        return batch.operations.make_rotation(batch.rotary_positions, self.frequency, self.scale, self.dtype)
