"""The rows of a step as recurrent kernels find them: a C structure that all layers point to."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch

from weft.kernels.interface import Batch
from weft.kernels.native.limits import MOST_TOKENS

# Where positions, checkpoints, tails and slots for new states lie; rows, tokens of a cell, threads.
STEP = Struct("4P3q")


class StepRows:
    """Where a step's rows lie in memory, as tails.h reads it."""

    def __init__(self, batch: Batch) -> None:
        self.values = ctypes.create_string_buffer(STEP.size)
        self.renew(batch)

    def renew(self, batch: Batch) -> None:
        assert batch.only_decodes
        assert batch.cell <= MOST_TOKENS
        # Lives as long as what points to it.
        self.batch: Batch | None = batch
        rows = (tensor.data_ptr() for tensor in (batch.start, batch.slot, batch.tail, batch.closing))
        STEP.pack_into(self.values, 0, *rows, batch.rows, batch.cell, torch.get_num_threads())

    def release(self) -> None:
        self.batch = None


def step_address(batch: Batch) -> int:
    """Of the rows of a step, made once for all of its layers."""
    found: StepRows | None = batch.derived.get(STEP)
    if found is None:
        found = batch.derived[STEP] = StepRows(batch)
    return ctypes.addressof(found.values)
