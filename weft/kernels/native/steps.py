"""How a step's rows, and whatever a layer adds to them, reach a recurrent kernel: as the bytes of one C structure.

One argument is converted per call instead of thirty. What a structure holds is said in C++, beside the kernel.
"""

from __future__ import annotations

from struct import Struct

import torch

from weft.kernels.batch import Batch

# Where positions, checkpoints, tails and slots for new states lie; rows, tokens of a cell, threads.
STEP = Struct("4P3q")
# Of the buffers that kernels have on the stack.
MOST_TOKENS, MOST_SIZE = 256, 512


def packed_step(batch: Batch) -> bytes:
    """The rows of a step, made once for all of its layers."""
    found: bytes | None = batch.derived.get(STEP)
    if found is None:
        lanes = batch.lanes
        assert lanes is not None
        assert lanes.decodes == lanes.rows
        assert lanes.cell <= MOST_TOKENS
        rows = (tensor.data_ptr() for tensor in (lanes.start, lanes.slot, lanes.tail, lanes.closing))
        found = batch.derived[STEP] = STEP.pack(*rows, lanes.rows, lanes.cell, torch.get_num_threads())
    return found
