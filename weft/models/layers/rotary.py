"""Rotary embedding as a layer: called once per step; all mixers that use it share the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.kernels.rotary import RotaryKind, Rotation, amplitude, frequencies
from weft.models.model import Layer


class Rotary(Layer):
    frequency: Tensor

    def __init__(
        self, kind: RotaryKind, dtype: torch.dtype, factors: Sequence[float] = (), scale: float | None = None
    ) -> None:
        """`factors` stretch pairs of dimensions one by one; a pair whose factor is infinite is not rotated."""
        super().__init__()
        self.kind = kind
        frequency = frequencies(kind)
        if factors:
            frequency = frequency / frequency.new_tensor(factors)
        self.register_buffer("frequency", frequency, persistent=False)
        self.scale = amplitude(kind) if scale is None else scale
        self.dtype = dtype

    def forward(self, batch: Batch) -> Rotation:
        return batch.operations.make_rotation(batch.rotary_positions, self.frequency, self.scale, self.dtype)


class RotaryByKind(Layer):
    """Rotary embeddings of layers of several kinds. Layers of a kind without one are not rotated."""

    def __init__(self, kinds: Sequence[str], rotaries: Mapping[str, Rotary]) -> None:
        super().__init__()
        self.kinds = list(kinds)
        self.of_kind = nn.ModuleDict({kind: each for kind, each in rotaries.items() if kind in kinds})

    def forward(self, batch: Batch) -> list[Rotation | None]:
        found: dict[str, Rotation] = {kind: rotary(batch) for kind, rotary in self.of_kind.items()}
        return [found.get(kind) for kind in self.kinds]
