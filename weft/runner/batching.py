"""Conversion of a plan into the batch that kernels see: index arithmetic on the host, then one upload.

It decides nothing and waits for nothing: a first token that is still on the device is read from the board there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from weft.base.parts import ranges
from weft.base.plan import Captures, Ints, Longs, Plan, row_arrays
from weft.device.staging import StagedValue
from weft.device.upload import upload
from weft.kernels.interface import NO_SLOT, Batch, HostStep, Operations, PageList
from weft.kernels.rows import RowPositions
from weft.memory.spec import AttentionMemory, MemorySpec


def build_batch(
    plan: Plan, spec: MemorySpec, board: Int[Tensor, " seats"], device: torch.device | str, operations: Operations
) -> Batch:
    """Return the batch of `plan`. `board` holds the token last sampled for every seat."""
    return build_step(plan, spec, board, device, operations, StagedValue(dict, {}))[0]


def build_step(
    plan: Plan,
    spec: MemorySpec,
    board: Int[Tensor, " seats"],
    device: torch.device | str,
    operations: Operations,
    others: StagedValue,
) -> tuple[Batch, Any]:
    """Return the batch of `plan`, and the step's other arrays from the same upload."""
    rows = RowPositions.of(plan, spec.cell)
    staged = stage_batch(plan, rows, spec, operations)
    arrays = staged.arrays()
    for name, array in others.arrays("others.").items():
        arrays[name] = array.astype(np.int64) if array.dtype == np.int32 else array
    on_board = np.flatnonzero(plan.from_board)
    if len(on_board):
        arrays |= {"board_token": rows.first[on_board], "board_seat": plan.seat[on_board]}
    tensors = upload(arrays, device, widen=False)
    if len(on_board):
        ids = tensors["token_ids"]
        ids[tensors["board_token"]] = board[tensors["board_seat"]].to(ids.dtype)
    return staged.finish(tensors), others.finish(tensors, "others.")


def stage_batch(plan: Plan, rows: RowPositions, spec: MemorySpec, operations: Operations) -> StagedValue:
    """Stage the `Batch`. Values that stay on the host are tensors already."""
    count, decodes, cell = plan.rows, rows.decodes, spec.cell
    positions, _ = ranges(rows.start, rows.length)
    long = slice(decodes, None)
    pieces = (rows.end[long] - 1) // cell - rows.start[long] // cell + 1
    number, owner = ranges(rows.start[long] // cell, pieces)
    slots = np.full(len(number), NO_SLOT, np.int32)
    closing = np.full(count, NO_SLOT, np.int32)
    first_piece = np.concatenate(([0], np.cumsum(pieces)))
    if len(plan.captures.row):
        write_captures(plan.captures, decodes, rows.start, cell, first_piece, slots, closing)
    first = np.append(rows.first, len(plan.tokens)).astype(np.int32)
    fields: dict[str, Any] = {
        "operations": operations,
        "tokens": len(plan.tokens),
        "rows": count,
        "decodes": decodes,
        "pieces": len(number),
        "most_pieces": int(pieces.max(initial=0)),
        "longest": int(rows.length.max()),
        "farthest": int(rows.end.max()),
        "cell": cell,
        "token_ids": plan.tokens,
        "positions": positions.astype(np.int32),
        "first": first,
        "slot": rows.slots.astype(np.int32),
        **{name: getattr(plan, name) for name in row_arrays(Plan, "kernels")},
        "closing": closing,
        "piece_row": (owner + decodes).astype(np.int32),
        "piece_position": (number * cell).astype(np.int32),
        "piece_slot": slots,
        "first_piece": first_piece.astype(np.int32),
        **stage_page_lists(plan, rows, spec),
        "host_start": torch.from_numpy(plan.start.copy()),
        "host_first": torch.from_numpy(first),
        "host": HostStep(plan, rows, spec),
    }
    return StagedValue(Batch, fields)


def write_captures(
    captures: Captures, decodes: int, start: Longs, cell: int, first_piece: Longs | Ints, slots: Ints, closing: Ints
) -> None:
    """Write each capture at the piece, or the decode, that ends there."""
    row, position = captures.row.astype(np.int64), captures.position.astype(np.int64)
    single = row < decodes
    closing[row[single]] = captures.slot[single]
    row, position = row[~single], position[~single]
    piece = first_piece[row - decodes] + (position - 1) // cell - start[row] // cell
    slots[piece] = captures.slot[~single]


def stage_page_lists(plan: Plan, rows: RowPositions, spec: MemorySpec) -> dict[str, StagedValue | None]:
    windows = {memory.window is not None for memory in spec.memories if isinstance(memory, AttentionMemory)}
    none = np.zeros(plan.rows, np.int32)
    full = stage_page_list(plan.page_table, none, rows, spec.cell) if False in windows else None
    windowed = stage_page_list(plan.window_table, plan.window_first, rows, spec.cell) if True in windows else None
    return {"full": full, "windowed": windowed}


def stage_page_list(table: Ints, first_cell: Ints, rows: RowPositions, cell: int) -> StagedValue:
    counts = -(-rows.end // cell) - first_cell
    positions, owners = ranges(rows.start, rows.length)
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    first_position = (first_cell * cell).astype(np.int32)
    fields = {
        "write_page": table[owners, positions // cell - first_cell[owners]],
        "first_position": first_position,
        "bounds": bounds,
        "pages": table[np.arange(table.shape[1]) < counts[:, None]],
        "host_bounds": torch.from_numpy(bounds),
        "host_first_position": torch.from_numpy(first_position),
    }
    return StagedValue(PageList, fields)
