"""Marks behind the blocks of a model's steps on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.device.marks import LayerMarks
from weft.models.decoder import Decoder, DecoderModel
from weft.models.model import CausalModel, Mixer


@dataclass(frozen=True, slots=True)
class StepMarker:
    """Marks the blocks of a step; mixer `i` is in `block_of[i]`."""

    decoder: Decoder
    block_of: tuple[int, ...]

    @contextmanager
    def mark(self) -> Iterator[LayerMarks]:
        """Mark every block that is computed meanwhile."""
        marks = LayerMarks(len(self.decoder.layers), self.block_of)
        self.decoder.passed = marks.add
        try:
            yield marks
        finally:
            self.decoder.passed = None


def marker_of(model: CausalModel, device: str) -> StepMarker | None:
    """Return what marks the steps of a model; None if the host computes them, or they have no blocks."""
    if device != "cuda" or not isinstance(model, DecoderModel):
        return None
    blocks = enumerate(model.model.layers)
    found = {part.index: block for block, layer in blocks for part in layer.modules() if isinstance(part, Mixer)}
    return StepMarker(model.model, tuple(found[index] for index in sorted(found)))
