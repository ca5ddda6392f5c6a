"""Rows of a step for recurrent kernels: a C structure that all layers point to."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch

from weft.kernels.interface import Batch
from weft.kernels.native.limits import MOST_TOKENS

# Addresses of positions, checkpoints, tails and slots for new states; rows, tokens of a cell, threads.
STEP = Struct("4P3q")


class StepRows:
    """Addresses of a step's rows, as tails.h reads them."""

    def __init__(self, batch: Batch) -> None:
        self.values = ctypes.create_string_buffer(STEP.size)
        self.renew(batch)

    def renew(self, batch: Batch) -> None:
        assert batch.only_decodes
        assert batch.cell <= MOST_TOKENS
        # Keeps the tensors alive.
        self.batch: Batch | None = batch
        rows = (tensor.data_ptr() for tensor in (batch.start, batch.slot, batch.tail, batch.closing))
        STEP.pack_into(self.values, 0, *rows, batch.rows, batch.cell, torch.get_num_threads())

    def release(self) -> None:
        self.batch = None


def step_address(batch: Batch) -> int:
    """Return the address of a step's rows, built once for all of its layers."""
    found: StepRows | None = batch.derived.get(STEP)
    if found is None:
        found = batch.derived[STEP] = StepRows(batch)
    return ctypes.addressof(found.values)
