"""Calls of packing.cpp: matrices put into panels."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from weft.kernels.native.calls import kernel
from weft.kernels.native.library import address

PACKING = Struct("5P9q")
# Outputs of a panel. rows.h has the same number.
PANEL = 32


def put_in_panels(
    matrices: Tensor,
    outputs: int,
    inputs: int,
    kind: int,
    panels: Tensor,
    shared: Tensor | None = None,
    own: Tensor | None = None,
    columns: int = 0,
) -> bool:
    """Fill panels of a matrix, or of one after another; return whether all of its codes are numbers.

    `kind` is one of stored.h. `shared` and `own` are scales of units of `columns` inputs and of blocks, where they do
    not lie between the codes.
    """
    rows = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
    assert len(rows) == 1 or panels.shape[0] == len(rows)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    assert panels.is_contiguous()
    shared = None if shared is None else shared.contiguous()
    own = None if own is None else own.contiguous()
    odd, strides = torch.zeros(1, dtype=torch.int64), [each * rows.element_size() for each in rows.stride()]
    pointers = (rows.data_ptr(), address(shared), address(own), panels.data_ptr(), odd.data_ptr())
    count = len(rows) * -(-outputs // PANEL)
    bytes_ = panels.nbytes // max(1, count)
    sizes = (kind, len(rows), outputs, inputs, strides[1], strides[0], columns, bytes_, torch.get_num_threads())
    # Not a call that a recorded step repeats.
    kernel("weft_pack")(PACKING.pack(*pointers, *sizes))
    return not bool(odd)
