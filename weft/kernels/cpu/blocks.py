"""Matmuls of many rows with panels of bfloat16 by PyTorch's float32 library, block by block of the outputs.

A block's weights are widened into a matrix of floats that stays in the caches, and multiplied from there. So memory is
read in 16 bits, and no second copy of the weights is kept. The library chooses the order of a sum by the number of rows:
a row does not have the same bits in every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.native.linear import PANEL
from weft.kernels.native.widening import finish, widen

# Bytes of a block's widened weights for each thread, about what a second-level cache holds.
BLOCK_BYTES = 1 << 20
# The library needs this number of columns to be fast.
LEAST_COLUMNS = 64
# Inputs of a block are counted as at least this number, so that short rows do not make blocks of thousands of columns.
LEAST_INPUTS = 256
# Rows whose sums are kept in float32 until they are rounded.
MOST_ROWS = 1024

_here = threading.local()


def product_in_blocks(
    x: Float[Tensor, "n inputs"],
    panels: Float[Tensor, "panels inputs 32"],
    outputs: int,
    bias: Float[Tensor, " outputs"] | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    parts: int = 1,
) -> Float[Tensor, "n results"]:
    """Return activation(x @ weight.T + bias); with two parts side by side, activation(first) * second.

    Bias and result have the dtype of x, float32 or bfloat16. Two parts must be whole panels each.
    """
    assert parts == 1 or outputs % (parts * PANEL) == 0, (outputs, parts)
    (rows, inputs), width = x.shape, outputs // parts
    inner, y = x.float(), x.new_empty(rows, width)
    columns = block_columns(inputs, width, parts)
    # Without anything to do after it, a matmul writes the result itself.
    is_bare = x.dtype == torch.float32 and bias is None and activation is None and parts == 1
    chunks = 1 if is_bare else -(-rows // MOST_ROWS)
    most_sums = 0 if is_bare else -(-rows // chunks) * parts * columns
    floats = scratch(inputs * parts * columns + most_sums)
    for first in range(0, width, columns):
        end = min(width, first + columns)
        padded = -(-(end - first) // PANEL) * PANEL
        wide = floats[: inputs * parts * padded].view(inputs, parts * padded)
        for part in range(parts):
            begin = (part * width + first) // PANEL
            widen(panels[begin : begin + padded // PANEL], wide[:, part * padded : (part + 1) * padded])
        if is_bare:
            torch.mm(inner, wide[:, : end - first], out=y[:, first:end])
            continue
        for some, results in zip(inner.tensor_split(chunks), y[:, first:end].tensor_split(chunks), strict=True):
            sums = floats[wide.numel() : wide.numel() + len(some) * wide.shape[1]].view(len(some), -1)
            torch.mm(some, wide, out=sums)
            finish(sums, results, bias, first, activation, parts)
    return y


def block_columns(inputs: int, width: int, parts: int) -> int:
    """Return the outputs of a block, of each part: whole panels, and blocks of about the same size."""
    most_bytes = BLOCK_BYTES * torch.get_num_threads()
    fitting = most_bytes // (4 * max(inputs, LEAST_INPUTS) * parts)
    most = max(LEAST_COLUMNS, fitting // PANEL * PANEL)
    return -(-width // (-(-width // most) * PANEL)) * PANEL


def scratch(count: int) -> Float[Tensor, " count"]:
    """Return floats that this thread keeps from call to call, so that the system need not clear new ones each time."""
    kept: Tensor | None = getattr(_here, "floats", None)
    if kept is None or len(kept) < count:
        # A tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            kept = _here.floats = torch.empty(count, dtype=torch.float32)
    return kept[:count]
