"""The gated delta rule: launches of its kernels, with the fastest measured configurations.

Rows of one token are decoded. Rows of a few tokens inside a cell read its state once. The others are cut at the grid,
solved piece by piece in parallel and walked in sequence. Matmuls take operands in the model's dtype; sums, decays and
states are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda.gated_delta.cells import solve_cells
from weft.kernels.cuda.gated_delta.decode import decode_rows, weigh_tails
from weft.kernels.cuda.gated_delta.short import NEW, close_short, read_short, solve_short
from weft.kernels.cuda.gated_delta.walk import walk_cells
from weft.kernels.cuda.launch.arguments import memory_of, pieces_of, rows_of, short_room, short_tokens
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.launch.launching import named, padded, power_of_two, precision
from weft.kernels.cuda.launch.overlap import early
from weft.kernels.interface import Batch
from weft.kernels.recurrent import DeltaInputs, DeltaShape, conv_parts, delta_state
from weft.memory.spec import Part, RecurrentMemory


class GatedDeltaLaunch(NamedTuple):
    """Launch configuration of a kernel."""

    values: int  # columns of a state that a program holds
    warps: int
    stages: int  # of loads in flight
    registers: int | None = None  # maximum per thread


class Weighing(NamedTuple):
    chunk: int  # tokens of a tail that are weighed at a time
    warps: int
    registers: int | None = None


DECODE = GatedDeltaLaunch(32, 1, 1)
# Few rows favour a short critical path and an early start. Many rows favour many concurrent programs, and those that
# start early block the kernel that they wait for. Sums over keys are then added in another order.
FEW_ROWS, WEIGH_FEW, WEIGH_MANY = 32, Weighing(64, 4), Weighing(16, 1)
SOLVE = GatedDeltaLaunch(0, 4, 1, registers=128)
# Either more concurrent programs per multiprocessor or, if there are too few programs, more loads in flight in each.
# Both give bitwise equal results.
WALK, WALK_FEW = GatedDeltaLaunch(32, 4, 2), GatedDeltaLaunch(32, 4, 3)
WIDE_KEYS = 128
# Rows of a few tokens. Few rows take more programs for a state, which fill the multiprocessors, and close cells in the
# programs that read. Both give bitwise equal results.
SHORT, SHORT_MANY, MANY_ROWS = GatedDeltaLaunch(64, 4, 1), GatedDeltaLaunch(128, 4, 1, registers=128), 32
# Closing apart: columns of a state, and the rows among which one is expected to close a cell.
CLOSE, ROWS_PER_CLOSING = GatedDeltaLaunch(64, 4, 3), 8
# The most of a thread of `solve_short`. With no bound, the compiler orders instructions in a way that takes 2 µs more.
# Operands of float32 need more.
SOLVE_SHORT_REGISTERS = 128
# Matmuls of float32 operands need more registers and shared memory.
SOLVE_WIDE, WALK_WIDE = GatedDeltaLaunch(0, 8, 1), GatedDeltaLaunch(32, 8, 1)


def gated_delta_memory(shape: DeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k and u, in the model's dtype, and the log decay since its cell's start.

    A tail is laid out by head, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.key_heads, shape.key_dim), dtype, apart=1),
        Part("u", (shape.value_heads, shape.value_dim), dtype, apart=1),
        Part("decay", (shape.value_heads,), "float32", apart=1),
    )
    return RecurrentMemory((window, *delta_state(shape)), tail, shape.conv_width)


def gated_delta(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView, exact: bool = False
) -> Float[Tensor, "tokens value_heads value_dim"]:
    """Return the outputs of all rows; write tails and captured states.

    `exact`: how a row is computed does not depend on others: one way to weigh tails, and no kernel for short rows.
    """
    check(inputs, view)
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    if batch.decodes:
        # The way of few rows: for many it costs less than the other would cost one.
        launch_decode(inputs, batch, view, y, DECODE, WEIGH_FEW if exact else None)
    if batch.rows > batch.decodes:
        new = 0 if exact else short_tokens(batch, NEW)
        # Tails have room for drafts, so steps of decodes and drafts have no other rows.
        room = short_room(batch.cell, view.tail["u"].shape[1], view)
        all_short = batch.longest <= min(new, room - batch.cell + 1)
        if new:
            launch_short(inputs, batch, view, y, new, short_choice(inputs, batch), all_short)
        if not all_short:
            launch_extend(inputs, batch, view, y, *extend_choices(inputs, batch), new)
    return y


def check(inputs: DeltaInputs, view: RecurrentView) -> None:
    """Assert what the kernels assume."""
    q, k, v = inputs.q, inputs.k, inputs.v
    assert q.stride() == k.stride() == (k.stride(0), k.shape[2], 1)
    assert v.stride() == (v.stride(0), v.shape[2], 1)
    assert inputs.step.stride() == inputs.strength.stride() == (inputs.step.stride(0), 1)
    assert q.dtype == k.dtype == v.dtype == view.tail["k"].dtype == view.tail["u"].dtype


def dimensions(inputs: DeltaInputs, batch: Batch, view: RecurrentView) -> dict[str, Any]:
    """Return the compile-time parameters that all kernels share."""
    key_heads, key_dim = inputs.k.shape[1:]
    return {
        "CELL": batch.cell,
        "RING": view.tail["u"].shape[1],
        "KEY_HEADS": key_heads,
        "SHARED": inputs.v.shape[1] // key_heads,
        "KEY_DIM": key_dim,
        "BLOCK": padded(batch.cell),
        "KEYS": padded(key_dim),
    }


def launch_decode(
    inputs: DeltaInputs,
    batch: Batch,
    view: RecurrentView,
    y: Tensor,
    choice: GatedDeltaLaunch,
    weighing: Weighing | None = None,
) -> None:
    rows, (heads, value_dim), key_heads = batch.decodes, inputs.v.shape[1:], inputs.k.shape[1]
    shared = dimensions(inputs, batch, view)
    lookups = inputs.v.new_empty(rows, key_heads, 2, shared["KEYS"], dtype=torch.float32)
    weights = inputs.v.new_empty(rows, heads, 2, shared["BLOCK"], dtype=torch.float32)
    factors = inputs.v.new_empty(rows, heads, 4, dtype=torch.float32)
    weighing = weighing or (WEIGH_FEW if rows <= FEW_ROWS else WEIGH_MANY)
    overlap = early(inputs.v, rows <= FEW_ROWS)
    weigh_tails[(key_heads, rows)](
        named(
            q=inputs.q, k=inputs.k, token_stride=inputs.q.stride(0), step=inputs.step, strength=inputs.strength,
            gate_stride=inputs.step.stride(0), rates=inputs.rates, bias=inputs.bias,
            lookups=lookups, weights=weights, factors=factors,
        ),
        memory_of(view), rows_of(batch),
        **shared, HEADS=power_of_two(heads // key_heads), CHUNK=min(weighing.chunk, shared["BLOCK"]),
        PROJECTED=inputs.rates is not None, MOST=inputs.most, num_warps=weighing.warps, **overlap,
    )  # fmt: skip
    values = min(choice.values, padded(value_dim))
    decode_rows[(-(-value_dim // values), heads, rows)](
        named(
            v=inputs.v, value_stride=inputs.v.stride(0), y=y, lookups=lookups, weights=weights, factors=factors,
        ),
        memory_of(view), rows_of(batch),
        **shared, VALUE_DIM=value_dim, VALUES=values, PRECISION=precision(inputs.v.dtype),
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers, **overlap,
    )  # fmt: skip


def extend_choices(inputs: DeltaInputs, batch: Batch) -> tuple[GatedDeltaLaunch, GatedDeltaLaunch]:
    if inputs.v.dtype == torch.float32:
        return SOLVE_WIDE, WALK_WIDE
    heads, value_dim = inputs.v.shape[1:]
    programs = (batch.rows - batch.decodes) * heads * -(-value_dim // WALK.values)
    # Three loads of wider keys do not fit in a multiprocessor's shared memory.
    is_wide = inputs.k.shape[2] > WIDE_KEYS
    return SOLVE, WALK if is_wide or programs > gpu_of(inputs.v.device).multiprocessors else WALK_FEW


def short_choice(inputs: DeltaInputs, batch: Batch) -> GatedDeltaLaunch:
    if batch.rows - batch.decodes < MANY_ROWS:
        return SHORT
    # Matmuls of float32 operands need more registers.
    return SHORT_MANY._replace(registers=None) if inputs.v.dtype == torch.float32 else SHORT_MANY


def launch_short(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView, y: Tensor, new: int, choice: GatedDeltaLaunch, alone: bool
) -> None:
    """Compute rows of at most `new` tokens for which `short_room` is enough; `alone`: all of them."""
    (heads, value_dim), rows = inputs.v.shape[1:], batch.rows - batch.decodes
    shared = dimensions(inputs, batch, view)
    is_wide = inputs.v.dtype == torch.float32
    closes_apart = rows >= MANY_ROWS
    systems = inputs.v.new_empty(rows, heads, 2 * new, 2 * new, dtype=torch.float32)
    factors = inputs.v.new_empty(rows, heads, 8 * new, dtype=torch.float32)
    closing = batch.start.new_empty(1 + rows) if closes_apart else None
    tokens = named(q=inputs.q, k=inputs.k, token_stride=inputs.k.stride(0))
    step = (memory_of(view), rows_of(batch), pieces_of(batch))
    constants = {
        **shared,
        "ROOM": short_room(batch.cell, shared["RING"], view),
        "NEW": new,
        "PRECISION": precision(inputs.v.dtype),
        **early(inputs.v),
    }
    solve_short[(inputs.k.shape[1], rows)](
        tokens,
        named(
            step=inputs.step, strength=inputs.strength, gate_stride=inputs.step.stride(0),
            rates=inputs.rates, bias=inputs.bias, systems=systems, factors=factors, closing=closing,
        ),
        *step, **constants, HEADS=power_of_two(shared["SHARED"]), PROJECTED=inputs.rates is not None, MOST=inputs.most,
        num_warps=1, maxnreg=None if is_wide else SOLVE_SHORT_REGISTERS,
    )  # fmt: skip
    values = min(choice.values, padded(value_dim))
    read_short[(-(-value_dim // values), heads, rows)](
        tokens,
        named(v=inputs.v, value_stride=inputs.v.stride(0), y=y, systems=systems, factors=factors),
        *step, **constants, VALUE_DIM=value_dim, VALUES=values, ALONE=alone, CLOSES=not closes_apart,
        num_warps=choice.warps, num_stages=1, maxnreg=choice.registers,
    )  # fmt: skip
    if closes_apart:
        values = min(CLOSE.values, padded(value_dim))
        close_short[(-(-value_dim // values), heads, -(-rows // ROWS_PER_CLOSING))](
            named(closing=closing), *step, **constants, VALUE_DIM=value_dim, VALUES=values, STAGES=CLOSE.stages,
            num_warps=CLOSE.warps, num_stages=1, maxnreg=CLOSE.registers,
        )  # fmt: skip


def launch_extend(
    inputs: DeltaInputs,
    batch: Batch,
    view: RecurrentView,
    y: Tensor,
    solve: GatedDeltaLaunch,
    walk: GatedDeltaLaunch,
    new: int = 0,
) -> None:
    """Compute rows of several tokens, but those that `launch_short` computes with the same `new`."""
    heads, value_dim = inputs.v.shape[1:]
    key_heads, key_dim = inputs.k.shape[1:]
    long_rows = batch.rows - batch.decodes
    shared = dimensions(inputs, batch, view)
    block, room = shared["BLOCK"], short_room(batch.cell, shared["RING"], view)
    systems = inputs.v.new_empty(batch.pieces, heads, 2, block, block)
    scales = inputs.v.new_empty(batch.pieces, heads, 5, block, dtype=torch.float32)
    head_keys = inputs.k.new_empty(long_rows, key_heads, block, key_dim)
    solve_cells[(heads, batch.pieces)](
        named(
            q=inputs.q, k=inputs.k, token_stride=inputs.q.stride(0), step=inputs.step, strength=inputs.strength,
            gate_stride=inputs.step.stride(0), rates=inputs.rates, bias=inputs.bias,
            systems=systems, scales=scales, head_keys=head_keys,
        ),
        memory_of(view), rows_of(batch), pieces_of(batch),
        **shared, ROOM=room, NEW=new, PROJECTED=inputs.rates is not None, MOST=inputs.most,
        PRECISION=precision(inputs.v.dtype), INNER=tl.float32 if inputs.v.dtype == torch.float32 else tl.float16,
        num_warps=solve.warps, num_stages=solve.stages, maxnreg=solve.registers,
    )  # fmt: skip
    # A small number if both are views of one tensor; valid otherwise too.
    q_offset = (inputs.q.data_ptr() - inputs.k.data_ptr()) // inputs.k.element_size()
    values = min(walk.values, padded(value_dim))
    walk_cells[(-(-value_dim // values), heads, long_rows)](
        named(
            k=inputs.k, q_offset=q_offset, token_stride=inputs.k.stride(0), v=inputs.v, value_stride=inputs.v.stride(0),
            y=y, systems=systems, scales=scales, head_keys=head_keys,
        ),
        memory_of(view), rows_of(batch), pieces_of(batch),
        **shared, ROOM=room, NEW=new, VALUE_DIM=value_dim, VALUES=values, STAGES=walk.stages,
        PRECISION=precision(inputs.v.dtype), num_warps=walk.warps, maxnreg=walk.registers,
    )  # fmt: skip
