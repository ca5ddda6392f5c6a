"""Events behind the blocks of a step, so that what a layer has written can be copied while later ones are computed."""

from __future__ import annotations

import torch


class LayerMarks:
    """The events of one step on a GPU, in the order of the model's blocks, of which the mixers are in `block_of`."""

    def __init__(self, blocks: int, block_of: tuple[int, ...]) -> None:
        self._blocks = blocks
        self._block_of = block_of
        self._events: list[torch.cuda.Event] = []

    def add(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)

    @property
    def are_complete(self) -> bool:
        return len(self._events) >= self._blocks

    def has_passed(self, layer: int) -> bool:
        """Return whether the memory of this index is written."""
        # A step may pass the blocks several times; the last time counts.
        return bool(self._events[self._block_of[layer] - self._blocks].query())
