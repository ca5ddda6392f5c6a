"""The state space recurrence on a GPU: kernel launches and their configurations.

Unlike the reference, a tail stores x unchanged, in the model's dtype, and dt beside it: nothing is rounded on the
way into a tail, so a prefill cut inside a cell is bitwise equal to an uncut one. Matmuls of a bfloat16 model
multiply bfloat16 numbers with float32 sums; decays, states and decodes' reads of a state are float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.launch.arguments import is_rounded, memory_of, pieces_of, rows_of, short_room, short_tokens
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.launch.launching import named, padded, power_of_two, precision
from weft.kernels.cuda.launch.overlap import early
from weft.kernels.cuda.ssd.choices import (
    DECODE,
    EARLY_ROWS,
    SHORT_HEADS,
    CellsChoice,
    DecodeChoice,
    cells_choice,
    short_choice,
    weighed_part,
)
from weft.kernels.cuda.ssd.decode import read_kernel, weigh_kernel
from weft.kernels.cuda.ssd.extend import cells_kernel, keep_kernel, steps_kernel
from weft.kernels.cuda.ssd.short import NEW, short_kernel, weigh_short
from weft.kernels.interface import Batch
from weft.kernels.recurrent import SsdInputs, SsdShape, conv_parts, ssd_state
from weft.memory.spec import Part, RecurrentMemory

# Minimum side of a matmul.
NARROWEST = 16
# Columns at a time of a program that closes a cell; its maximum number of iterations, and of state elements in all.
# There are few programs, as most have nothing to do; measured on an H200.
CLOSING_BLOCK, CLOSING_BLOCKS, CLOSING_NUMBERS = 16, 10, 20480


def ssd_memory(shape: SsdShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves x and B unchanged, dt, and the log decay since its cell's start.

    A tail is laid out by head, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("input", (shape.heads, shape.head_dim), dtype, apart=1),
        Part("B", (shape.groups, shape.state), dtype, apart=1),
        Part("decay", (shape.heads,), "float32", apart=1),
        Part("dt", (shape.heads,), "float32", apart=1),
    )
    return RecurrentMemory((window, *ssd_state(shape)), tail, shape.conv_width)


def ssd(
    inputs: SsdInputs,
    batch: Batch,
    view: RecurrentView,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
    exact: bool = False,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Return the outputs of all rows; write tails and captured states.

    `exact`: how a row is computed does not depend on others, so there is no kernel for short rows.
    """
    x, B, C = (by_token(tensor) for tensor in (inputs.x, inputs.B, inputs.C))
    inputs = replace(inputs, x=x, B=B, C=C)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert y.stride()[1:] == (y.shape[2], 1)
    if batch.decodes:
        decode(inputs, batch, view, y)
    if batch.pieces:
        extend(inputs, batch, view, y, exact=exact)
        if inputs.gate is not None:
            rest = y[batch.decodes :].flatten(1)
            activate("silu", inputs.gate[batch.decodes :], rest, out=rest)
    return y


def by_token(tensor: Float[Tensor, "tokens a b"]) -> Float[Tensor, "tokens a b"]:
    """Return the tensor with each token contiguous; from token to token it may be strided."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def decode(
    inputs: SsdInputs,
    batch: Batch,
    view: RecurrentView,
    y: Float[Tensor, "tokens heads head_dim"],
    choice: DecodeChoice | None = None,
) -> None:
    """Compute the leading rows, of one token each; write outputs to `y`, gated if there is a gate."""
    x, B, C = inputs.x, inputs.B, inputs.C
    heads, head_dim = x.shape[1:]
    groups, state = B.shape[1:]
    group_heads, block_state = heads // groups, padded(state)
    choice = choice or DECODE
    cell, width = batch.cell, group_heads * head_dim
    weights = torch.empty((batch.decodes, heads, cell), dtype=x.dtype, device=x.device)
    scales = torch.empty((batch.decodes, heads, 2), dtype=torch.float32, device=x.device)
    low_limit, high_limit = finite(inputs.limit)
    sizes: dict[str, Any] = {
        "GROUPS": groups, "GROUP_HEADS": group_heads, "STATE": state, "BLOCK_STATE": block_state,
        "CELL": cell, "RING": view.tail["input"].shape[1],
        **early(x, batch.decodes <= EARLY_ROWS),
    }  # fmt: skip
    weigh_kernel[(groups * -(-group_heads // NARROWEST), batch.decodes)](
        named(
            dt=inputs.dt, dt_stride=inputs.dt.stride(0), A=inputs.A, B=B, B_stride=B.stride(0), C=C,
            C_stride=C.stride(0), D=inputs.D, dt_bias=inputs.dt_bias, low_limit=low_limit, high_limit=high_limit,
            weights=weights, scales=scales,
        ),
        memory_of(view), rows_of(batch), HEAD_BLOCK=NARROWEST, num_warps=4, **sizes,
    )  # fmt: skip
    columns = choice.block * choice.blocks
    touched = min(group_heads, heads_touched(columns, head_dim))
    closing_blocks = blocks_to_close(width, block_state)
    programs = -(-width // columns) + -(-width // (CLOSING_BLOCK * closing_blocks))
    gate = inputs.gate
    assert gate is None or gate.stride(1) == 1
    read_kernel[(batch.decodes * groups * programs,)](
        named(
            x=x, x_stride=x.stride(0), C=C, C_stride=C.stride(0), weights=weights, scales=scales, gate=gate,
            gate_stride=0 if gate is None else gate.stride(0), y=y, y_stride=y.stride(0), rows=batch.decodes,
        ),
        memory_of(view), rows_of(batch),
        HEAD_DIM=head_dim, HEAD_BLOCK=padded(touched), BLOCK=choice.block, BLOCKS=choice.blocks, STAGES=choice.stages,
        CLOSING_BLOCK=CLOSING_BLOCK, CLOSING_BLOCKS=closing_blocks, PRECISION=precision(x.dtype),
        num_warps=choice.warps, **sizes,
    )  # fmt: skip


def extend(
    inputs: SsdInputs,
    batch: Batch,
    view: RecurrentView,
    y: Float[Tensor, "tokens heads head_dim"],
    choice: CellsChoice | None = None,
    exact: bool = False,
) -> None:
    """Compute the other rows; write ungated outputs to `y`."""
    x, dt, B, C = inputs.x, inputs.dt, inputs.B, inputs.C
    heads, head_dim = x.shape[1:]
    groups, state = B.shape[1:]
    rows, cell, block_state = batch.rows - batch.decodes, batch.cell, padded(state)
    ring = view.tail["input"].shape[1]
    new = 0 if exact else short_tokens(batch, NEW)
    # Tails have room for drafts, so steps of decodes and drafts have no other rows, and none that is longer.
    room = short_room(cell, ring, view)
    drafts = min(new, room - cell + 1)
    all_short = batch.longest <= drafts and not is_rounded(view)
    if all_short:
        new = power_of_two(drafts)
    sizes: dict[str, Any] = {
        "GROUPS": groups, "GROUP_HEADS": heads // groups, "HEAD_DIM": head_dim, "STATE": state,
        "BLOCK_STATE": block_state, "CELL": cell, "RING": ring, "ROOM": room if all_short else cell - 1, "NEW": new,
        "PRECISION": precision(x.dtype) if block_state <= 128 else widest(x.dtype),
    }  # fmt: skip
    if new:
        launch_short(inputs, y, batch, view, sizes, all_short)
    if all_short:
        return
    choice = choice or cells_choice(rows, heads, head_dim, block_state, x.dtype, gpu_of(x.device))
    totals, shifted, left = torch.empty((3, heads, batch.pieces, cell), dtype=torch.float32, device=x.device)
    low_limit, high_limit = finite(inputs.limit)
    step = (memory_of(view), rows_of(batch), pieces_of(batch))
    head_block = min(NARROWEST, power_of_two(heads))
    steps_kernel[(batch.pieces, -(-heads // head_block))](
        named(
            dt=dt, dt_stride=dt.stride(0), A=inputs.A, dt_bias=inputs.dt_bias, low_limit=low_limit,
            high_limit=high_limit, totals=totals, shifted=shifted, left=left,
        ),
        *step, HEADS=heads, CELL=cell, RING=ring, HEAD_BLOCK=head_block, num_warps=2,
    )  # fmt: skip
    cells_kernel[(heads * -(-head_dim // choice.block), rows)](
        named(
            x=x, x_stride=x.stride(0), B=B, B_stride=B.stride(0), C=C, C_stride=C.stride(0), D=inputs.D,
            y=y, y_stride=y.stride(0), totals=totals, shifted=shifted, left=left,
        ),
        *step, **sizes, BLOCK=choice.block, num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
    keep_kernel[(min(ring, batch.longest), rows)](
        named(
            x=x, x_stride=x.stride(0), dt=dt, dt_stride=dt.stride(0), B=B, B_stride=B.stride(0),
            dt_bias=inputs.dt_bias, low_limit=low_limit, high_limit=high_limit, totals=totals,
        ),
        *step, HEADS=heads, HEAD_DIM=head_dim, GROUPS=groups, STATE=state, CELL=cell, RING=ring, ROOM=sizes["ROOM"],
        NEW=new, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def launch_short(
    inputs: SsdInputs, y: Tensor, batch: Batch, view: RecurrentView, sizes: dict[str, Any], alone: bool
) -> None:
    """Compute rows of a few tokens, with those before them in their cell at most ROOM; `alone`: all of them."""
    x, B, C, dt = inputs.x, inputs.B, inputs.C, inputs.dt
    heads, head_dim = x.shape[1:]
    rows, group_heads, groups, new = batch.rows - batch.decodes, sizes["GROUP_HEADS"], sizes["GROUPS"], sizes["NEW"]
    step = (memory_of(view), rows_of(batch), pieces_of(batch))
    weights = x.new_empty(rows, heads, new, batch.cell + new)
    scales = x.new_empty(rows, heads, new, dtype=torch.float32)
    low_limit, high_limit = finite(inputs.limit)
    sizes = {**sizes, **early(x)}
    to_weigh = {name: size for name, size in sizes.items() if name != "HEAD_DIM"} | {"PRECISION": precision(x.dtype)}
    head_block = min(SHORT_HEADS, power_of_two(group_heads))
    weigh_short[(groups * -(-group_heads // head_block), rows)](
        named(
            dt=dt, dt_stride=dt.stride(0), A=inputs.A, B=B, B_stride=B.stride(0), C=C, C_stride=C.stride(0),
            dt_bias=inputs.dt_bias, low_limit=low_limit, high_limit=high_limit, weights=weights, scales=scales,
        ),
        *step, **to_weigh, HEAD_BLOCK=head_block, PART=weighed_part(sizes["BLOCK_STATE"], x.dtype), num_warps=4,
    )  # fmt: skip
    choice = short_choice(sizes["BLOCK_STATE"], x.dtype)
    touched = min(group_heads, heads_touched(choice.block, head_dim))
    short_kernel[(rows * groups * -(-group_heads * head_dim // choice.block),)](
        named(
            x=x, x_stride=x.stride(0), C=C, C_stride=C.stride(0), D=inputs.D, weights=weights, scales=scales, y=y,
            y_stride=y.stride(0),
        ),
        *step, **sizes, TOUCHED=touched, LINES=padded(touched * new), BLOCK=choice.block, CLOSED=choice.closed,
        ALONE=alone, num_warps=choice.warps, maxnreg=choice.registers,
    )  # fmt: skip


def heads_touched(columns: int, head_dim: int) -> int:
    """Return the most heads that a block of columns touches, wherever in a group it is.

    >>> heads_touched(64, 64), heads_touched(64, 80), heads_touched(64, 128), heads_touched(64, 16)
    (1, 2, 1, 4)
    """
    return (head_dim - math.gcd(columns, head_dim) + columns - 1) // head_dim + 1


def blocks_to_close(width: int, block_state: int) -> int:
    """Return the blocks of columns that a program closes."""
    return min(CLOSING_BLOCKS, CLOSING_NUMBERS // (CLOSING_BLOCK * block_state), -(-width // CLOSING_BLOCK))


def finite(limit: tuple[float, float]) -> tuple[float, float]:
    """Return bounds that float32 can represent."""
    return limit[0], min(limit[1], math.ldexp(1.0, 126))


def widest(dtype: torch.dtype) -> str:
    """Return the precision where three TF32 matmuls would exceed the shared memory."""
    return "ieee" if dtype == torch.float32 else "tf32"
