"""The rows of a step as recurrent kernels find them: a C structure that all layers point to."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch

from weft.kernels.batch import Batch
from weft.kernels.lanes import Lanes
from weft.kernels.native.limits import MOST_TOKENS

# Where positions, checkpoints, tails and slots for new states lie; rows, tokens of a cell, threads.
STEP = Struct("4P3q")


class StepRows:
    """Where a step's rows lie in memory, as tails.h reads it."""

    def __init__(self, batch: Batch) -> None:
        self.values = ctypes.create_string_buffer(STEP.size)
        self.renew(batch)

    def renew(self, batch: Batch) -> None:
        lanes = batch.lanes
        assert lanes is not None
        assert lanes.decodes == lanes.rows
        assert lanes.cell <= MOST_TOKENS
        # Lives as long as what points to it.
        self.lanes: Lanes | None = lanes
        rows = (tensor.data_ptr() for tensor in (lanes.start, lanes.slot, lanes.tail, lanes.closing))
        STEP.pack_into(self.values, 0, *rows, lanes.rows, lanes.cell, torch.get_num_threads())

    def release(self) -> None:
        self.lanes = None


def step_address(batch: Batch) -> int:
    """Of the rows of a step, made once for all of its layers."""
    found: StepRows | None = batch.derived.get(STEP)
    if found is None:
        found = batch.derived[STEP] = StepRows(batch)
    return ctypes.addressof(found.values)
