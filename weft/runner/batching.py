"""A plan into the batch that kernels see: index arithmetic on the host, then one upload.

Decides nothing and waits for nothing: a first token that is still on the device is taken from the board there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from weft.base.plan import Ints, Plan
from weft.kernels.batch import Batch, Paging
from weft.kernels.cutting import Longs, Rows, cut, ranges
from weft.kernels.draft import Draft
from weft.kernels.lane_cutting import draft_lanes
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.upload import upload


def build_batch(
    plan: Plan, spec: MemorySpec, board: Int[Tensor, " seats"], device: torch.device | str, lanes: bool = False
) -> Batch:
    """What layers need to know of `plan`. `board` holds the token last sampled for every seat."""
    return build_step(plan, spec, board, device, Draft(dict, {}), lanes)[0]


def build_step(
    plan: Plan,
    spec: MemorySpec,
    board: Int[Tensor, " seats"],
    device: torch.device | str,
    beside: Draft,
    lanes: bool = False,
    native: bool = False,
) -> tuple[Batch, Any]:
    """The same, and in the same upload whatever else the step needs.

    `lanes`: for kernels that walk over rows, of a GPU or with `native` of a CPU.
    """
    rows = Rows.of(plan, spec.cell)
    draft = draft_lane_batch(plan, rows, spec, native) if lanes else draft_batch(plan, rows, spec)
    arrays = draft.arrays()
    for name, array in beside.arrays("beside.").items():
        arrays[name] = array.astype(np.int64) if array.dtype == np.int32 else array
    on_board = np.flatnonzero(plan.from_board)
    if len(on_board):
        arrays |= {"board_token": rows.first[on_board], "board_seat": plan.seat[on_board]}
    tensors = upload(arrays, device, widen=not lanes)
    if len(on_board):
        ids = tensors["token_ids"]
        ids[tensors["board_token"]] = board[tensors["board_seat"]].to(ids.dtype)
    return draft.finish(tensors), beside.finish(tensors, "beside.")


def draft_batch(plan: Plan, rows: Rows, spec: MemorySpec) -> Draft:
    positions, owners = ranges(rows.start, rows.length)
    return Draft(
        Batch,
        {
            "tokens": len(plan.tokens),
            "rows": plan.rows,
            "decode_rows": rows.decodes,
            "token_ids": plan.tokens,
            "positions": positions,
            "start": rows.start,
            "end": rows.end,
            "host_start": tuple(rows.start.tolist()),
            "host_end": tuple(rows.end.tolist()),
            "host_first": tuple(rows.first.tolist()),
            **draft_pagings(plan, spec, positions, owners),
            **cut(plan, rows, spec),
        },
    )


def draft_lane_batch(plan: Plan, rows: Rows, spec: MemorySpec, native: bool = False) -> Draft:
    positions, _ = ranges(rows.start, rows.length)
    return Draft(
        Batch,
        {
            "tokens": len(plan.tokens),
            "rows": plan.rows,
            "decode_rows": rows.decodes,
            "token_ids": plan.tokens,
            "positions": positions.astype(np.int32),
            **dict.fromkeys(("start", "end", "full", "windowed", "decodes", "convolution")),
            **dict.fromkeys(("host_start", "host_end", "host_first", "groups"), ()),
            "lanes": draft_lanes(plan, rows, spec, native),
        },
    )


def draft_pagings(plan: Plan, spec: MemorySpec, positions: Longs, owners: Longs) -> dict[str, Draft | None]:
    windows = {memory.window is not None for memory in spec.memories if isinstance(memory, AttentionMemory)}
    none = np.zeros(plan.rows, np.int64)
    full = draft_paging(plan.page_table, none, positions, owners, spec.cell) if False in windows else None
    first = plan.window_first.astype(np.int64)
    windowed = draft_paging(plan.window_table, first, positions, owners, spec.cell) if True in windows else None
    return {"full": full, "windowed": windowed}


def draft_paging(table: Ints, first_cell: Longs, positions: Longs, owners: Longs, cell: int) -> Draft:
    page, offset = table[owners, positions // cell - first_cell[owners]], positions % cell
    fields = {
        "write_page": page,
        "write_offset": offset,
        "table": table,
        "first_position": first_cell * cell,
        "lone": (int(page[0]), int(offset[0])) if len(page) == 1 else None,
    }
    return Draft(Paging, fields)
