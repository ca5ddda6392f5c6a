"""Decode-only steps on a CPU, recorded once for each number of rows and replayed without Python.

This is the counterpart of CUDA graphs. A model whose decodes compute something with torch's operators (norms across
heads, OLMo-Hybrid) is never replayed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.interface import Batch
from weft.kernels.native.calls import RecordedMemory, Recording, RenewableValues, record, replay

# Limit on the intermediate tensors of a recorded step. All of a model's recordings share their memory.
MOST_BYTES = 128 << 20


# Maps a step to its final hidden states.
Compute: TypeAlias = Callable[[Batch], Float[Tensor, "tokens hidden"]]


class RecordedStep:
    """A recorded step with a given number of rows: its inputs, its calls, its result."""

    def __init__(self, batch: Batch, recording: Recording, hidden: Float[Tensor, "rows hidden"]) -> None:
        self.batch = batch
        self.rotary = batch.rotary_positions
        self.recording = recording
        self.program: ctypes.Array[ctypes.c_void_p] = recording.program()
        self.hidden = hidden

    def run(self, batch: Batch) -> Float[Tensor, "rows hidden"]:
        """Return the result for the rows of `batch`, in the same memory every time."""
        self.batch.token_ids.copy_(batch.token_ids)
        self.rotary.copy_(batch.rotary_positions)
        for prepared in self.batch.derived.values():
            prepared.renew(batch)
        replay(self.program)
        for prepared in self.batch.derived.values():
            prepared.release()
        return self.hidden


class Replays:
    """Steps of one model on one memory, recorded as they come: at most two for each number of rows."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        # By rows and threads; None: do not record.
        self.steps: dict[tuple[int, int], RecordedStep | None] = {}
        # Steps that only rows in order replay: for others, a routine that cannot be recorded is faster.
        self.ordered: dict[tuple[int, int], RecordedStep | None] = {}
        self.memory = RecordedMemory(MOST_BYTES)
        # Steps with this number of rows or more use torch's operators, with and without order: do not try again.
        self.too_many: dict[bool, float] = {False: math.inf, True: math.inf}

    def __call__(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the final hidden states of a step."""
        return self.run(batch) if batch.only_decodes else self.compute(batch)

    def run(self, batch: Batch) -> Float[Tensor, "rows hidden"]:
        """Return the final hidden states of a decode-only step."""
        if self._key(batch) not in self.steps and batch.rows < self.too_many[False]:
            return self._first(batch, in_order=False)
        step = self.steps.get(self._key(batch))
        return self.compute(batch) if step is None else step.run(batch)

    def in_order(self, batch: Batch) -> Float[Tensor, "rows hidden"] | None:
        """Return the final hidden states of rows of one token, of which neighbours may be of one sequence.

        Only the C++ kernels compute such rows in order. If the step cannot be replayed, its results are wrong: return
        None. A first attempt (`is_new`) has overwritten pages, slots and tails by then. Pages and slots are written
        again when the step is repeated; the tails must be restored before that.
        """
        hidden = self._first(batch, in_order=True) if self.is_new(batch) else None
        step = self._in_order(batch)
        if step is None:
            return None
        return step.run(batch) if hidden is None else hidden

    def is_new(self, batch: Batch) -> bool:
        """Return whether the step will be recorded for rows in order: none with as many rows was."""
        new = self._key(batch) not in self.ordered and self._in_order(batch) is None
        return new and batch.rows < self.too_many[True]

    def _in_order(self, batch: Batch) -> RecordedStep | None:
        key = self._key(batch)
        return self.steps.get(key) or self.ordered.get(key)

    def _key(self, batch: Batch) -> tuple[int, int]:
        return batch.rows, torch.get_num_threads()

    def _first(self, batch: Batch, in_order: bool) -> Float[Tensor, "rows hidden"]:
        # Calls point to tokens and to the positions that they rotate by, so these get their own memory.
        own = replace(batch, token_ids=batch.token_ids.clone(), rotary=batch.rotary_positions.clone(), derived={})
        with record(self.memory, in_order) as recording:
            hidden = self.compute(own)
        whole = recording.pure and all(isinstance(value, RenewableValues) for value in own.derived.values())
        step = RecordedStep(own, recording, hidden) if whole and self.memory.suffices else None
        # If order changed nothing, the step is everyone's.
        steps = self.ordered if in_order and (step is None or recording.preferred) else self.steps
        steps[self._key(batch)] = step
        if not whole:
            self.too_many[in_order] = min(self.too_many[in_order], batch.rows)
        return hidden
