"""Steps of decodes on a CPU, recorded once for every number of rows and made again without Python in between.

The counterpart of a GPU's graphs. A model whose decodes compute something by torch's operators (routing of experts) is
run as it is, every time.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch
from weft.kernels.native.calls import Prepared, Recording, record, replay
from weft.memory.device.store import View
from weft.models.model import CausalModel

# All that recordings keep of steps in between, together.
MOST_BYTES = 128 << 20


class RecordedStep:
    """A step of so many rows: what it reads, its calls, what it yields."""

    def __init__(self, batch: Batch, recording: Recording, hidden: Float[Tensor, "rows hidden"]) -> None:
        self.batch = batch
        self.recording = recording
        self.program: ctypes.Array[ctypes.c_void_p] = recording.program()
        self.hidden = hidden

    def run(self, batch: Batch) -> Float[Tensor, "rows hidden"]:
        """Its outcome for the rows of `batch`, in the same place every time."""
        self.batch.token_ids.copy_(batch.token_ids)
        self.batch.positions.copy_(batch.positions)
        for prepared in self.batch.derived.values():
            prepared.renew(batch)
        replay(self.program)
        for prepared in self.batch.derived.values():
            prepared.release()
        return self.hidden


class Replays:
    def __init__(self, model: CausalModel, views: tuple[View, ...]) -> None:
        self.model = model
        self.views = views
        # By rows and threads; None: not to be recorded.
        self.steps: dict[tuple[int, int], RecordedStep | None] = {}
        self.bytes_left = MOST_BYTES
        # As many rows, and all above, are computed by torch: no need to try again.
        self.too_many: float = math.inf

    def run(self, batch: Batch) -> Float[Tensor, "rows hidden"]:
        """The final hidden states of a step of decodes with lanes."""
        key = (batch.rows, torch.get_num_threads())
        if key not in self.steps and batch.rows < self.too_many:
            return self._first(key, batch)
        step = self.steps.get(key)
        return self.model(batch, self.views) if step is None else step.run(batch)

    def _first(self, key: tuple[int, int], batch: Batch) -> Float[Tensor, "rows hidden"]:
        # Calls point to tokens and positions: they get a place of their own.
        own = replace(batch, token_ids=batch.token_ids.clone(), positions=batch.positions.clone(), derived={})
        with record() as recording:
            hidden = self.model(own, self.views)
        size = sum(tensor.nbytes for tensor in recording.kept)
        whole = recording.pure and all(isinstance(value, Prepared) for value in own.derived.values())
        fits = size <= self.bytes_left
        self.steps[key] = RecordedStep(own, recording, hidden) if whole and fits else None
        if not whole:
            self.too_many = min(self.too_many, batch.rows)
        elif fits:
            self.bytes_left -= size
        return hidden
