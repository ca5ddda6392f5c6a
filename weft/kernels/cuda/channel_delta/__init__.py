"""The delta rule with decays by channel: launches of its kernels.

Matmuls take operands in the model's dtype; sums, decays and states are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.channel_delta.decode import decode_channels, weigh_channels
from weft.kernels.cuda.channel_delta.extend import solve_channels, walk_channels
from weft.kernels.cuda.gated_delta import FEW_ROWS
from weft.kernels.cuda.launch.arguments import memory_of, pieces_of, rows_of
from weft.kernels.cuda.launch.launching import named, padded, precision
from weft.kernels.cuda.launch.overlap import early
from weft.kernels.interface import Batch
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape, channel_delta_state, conv_parts
from weft.memory.spec import Part, RecurrentMemory

# Value columns of a state that a program holds, and tokens of a tail that are weighed at a time. Those of the gated
# delta rule; not measured for this one.
VALUES, CHUNK = 32, 16


def channel_delta_memory(shape: ChannelDeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k and u, in the model's dtype, and its log decays since its cell's start.

    A tail is laid out by head, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.heads, shape.key_dim), dtype, apart=1),
        Part("u", (shape.heads, shape.value_dim), dtype, apart=1),
        Part("decay", (shape.heads, shape.key_dim), "float32", apart=1),
    )
    return RecurrentMemory((window, *channel_delta_state(shape)), tail, shape.conv_width)


def channel_delta(
    inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens heads value_dim"]:
    check(inputs, view)
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    if batch.decodes:
        decode(inputs, batch, view, y)
    if batch.pieces:
        extend(inputs, batch, view, y)
    return y


def check(inputs: ChannelDeltaInputs, view: RecurrentView) -> None:
    """Assert what the kernels assume."""
    assert inputs.q.stride() == inputs.k.stride()
    for tensor in (inputs.k, inputs.v, inputs.step):
        assert tensor.stride()[1:] == (tensor.shape[2], 1)
    assert inputs.strength.stride(1) == 1
    assert inputs.bias is None or inputs.bias.is_contiguous()
    assert inputs.q.dtype == inputs.k.dtype == inputs.v.dtype == view.tail["k"].dtype == view.tail["u"].dtype


def tokens_of(inputs: ChannelDeltaInputs) -> dict[str, Any]:
    """Return the arguments that describe all tokens but for their values."""
    return {
        "q": inputs.q, "k": inputs.k, "token_stride": inputs.k.stride(0), "step": inputs.step,
        "step_stride": inputs.step.stride(0), "strength": inputs.strength,
        "strength_stride": inputs.strength.stride(0), "rates": inputs.rates, "bias": inputs.bias,
    }  # fmt: skip


def dimensions(inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView) -> dict[str, int]:
    """Return the compile-time parameters that all kernels share."""
    heads, key_dim = inputs.k.shape[1:]
    return {
        "CELL": batch.cell, "RING": view.tail["u"].shape[1], "HEADS": heads, "KEY_DIM": key_dim,
        "BLOCK": padded(batch.cell), "KEYS": padded(key_dim),
    }  # fmt: skip


def decode(inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView, y: Tensor) -> None:
    """Compute the leading rows, of one token each."""
    rows, heads, value_dim = batch.decodes, *inputs.v.shape[1:]
    shared, overlap = dimensions(inputs, batch, view), early(inputs.v, rows <= FEW_ROWS)
    found = {
        "lookups": inputs.v.new_empty(rows, heads, 3, shared["KEYS"], dtype=torch.float32),
        "weights": inputs.v.new_empty(rows, heads, 2, shared["BLOCK"], dtype=torch.float32),
        "factors": inputs.v.new_empty(rows, heads, 2, dtype=torch.float32),
    }
    step = (memory_of(view), rows_of(batch))
    weigh_channels[(heads, rows)](
        named(**tokens_of(inputs), **found), *step, **shared, CHUNK=CHUNK, num_warps=4, **overlap
    )
    values = min(VALUES, padded(value_dim))
    decode_channels[(-(-value_dim // values), heads, rows)](
        named(v=inputs.v, value_stride=inputs.v.stride(0), y=y, **found), *step,
        **shared, VALUE_DIM=value_dim, VALUES=values, PRECISION=precision(inputs.v.dtype),
        num_warps=1, num_stages=1, **overlap,
    )  # fmt: skip


def extend(inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView, y: Tensor) -> None:
    """Compute the other rows."""
    v, (heads, key_dim), value_dim = inputs.v, inputs.k.shape[1:], inputs.v.shape[2]
    shared, is_wide = dimensions(inputs, batch, view), v.dtype == torch.float32
    block, pieces = shared["BLOCK"], batch.pieces
    solved = {
        "systems": v.new_empty(pieces, heads, 2, block, block),
        "operands": v.new_empty(pieces, heads, 3, block, key_dim),
        "units": v.new_empty(pieces, heads, block, key_dim),
        "totals": v.new_empty(pieces, heads, block, key_dim, dtype=torch.float32),
        "scales": v.new_empty(pieces, heads, block, dtype=torch.float32),
    }
    step = (memory_of(view), rows_of(batch), pieces_of(batch))
    solve_channels[(heads, pieces)](
        named(**tokens_of(inputs), **solved), *step, **shared, INNER=tl.float32 if is_wide else tl.float16,
        PRECISION=precision(v.dtype), num_warps=8,
    )  # fmt: skip
    values = min(VALUES, padded(value_dim))
    walk_channels[(-(-value_dim // values), heads, batch.rows - batch.decodes)](
        named(v=v, value_stride=v.stride(0), y=y, **solved), *step,
        **shared, VALUE_DIM=value_dim, VALUES=values, STAGES=1 if is_wide else 2, PRECISION=precision(v.dtype),
        num_warps=8 if is_wide else 4,
    )  # fmt: skip
