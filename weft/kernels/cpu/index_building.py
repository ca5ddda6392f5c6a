"""Rows of a plan, cut at the grid: the indices that the layers of a step share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.base.parts import ranges
from weft.base.plan import Ints, Longs, Plan
from weft.device.staging import StagedValue
from weft.kernels.cpu.indices import (
    CaptureAt,
    Convolution,
    Decodes,
    Group,
    Indices,
    OpenCell,
    Paging,
    Rank,
    TailWrites,
)
from weft.kernels.interface import Batch
from weft.kernels.rows import RowPositions
from weft.memory.spec import AttentionMemory, MemorySpec, RecurrentMemory

# Rows per group: the intermediate values of a rank of this size should fit in a core's cache.
GROUP_ROWS = 8


def indices(batch: Batch) -> Indices:
    """Return the indices of a step, derived when the first layer asks."""
    found: Indices | None = batch.derived.get(Indices)
    if found is None:
        assert batch.host is not None, "a recorded step has no rows on the host"
        staged = stage_indices(batch.host.plan, batch.host.rows, batch.host.spec)
        tensors = {name: torch.from_numpy(widened(array)) for name, array in staged.arrays().items()}
        found = batch.derived[Indices] = staged.finish(tensors)
    return found


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Return integers in 64 bits, so that no layer converts an index."""
    return array.astype(np.int64) if array.dtype == np.int32 else np.ascontiguousarray(array)


def stage_indices(plan: Plan, rows: RowPositions, spec: MemorySpec) -> StagedValue:
    """Stage the `Indices` that the model needs."""
    ring = first_ring(spec, convolution=False)
    fields: dict[str, Any] = {"decodes": None, "groups": (), "convolution": None}
    if ring is not None and rows.decodes:
        fields["decodes"] = stage_decodes(plan, rows, ring)
    if ring is not None and rows.decodes < plan.rows:
        fields["groups"] = stage_groups(plan, rows, spec, ring)
    ring = first_ring(spec, convolution=True)
    if ring is not None:
        fields["convolution"] = stage_convolution(plan, rows, spec, ring)
    return StagedValue(Indices, fields | stage_pagings(plan, rows, spec))


def first_ring(spec: MemorySpec, convolution: bool) -> int | None:
    """Return the length of a model's tails, which is the same in all of its layers."""
    for memory in spec.memories:
        if isinstance(memory, RecurrentMemory):
            for part in memory.tail:
                if (part.name == "conv") == convolution:
                    return spec.ring(memory, part)
    return None


def open_cells(plan: Plan, rows: RowPositions, chosen: slice | Longs, ring: int) -> tuple[OpenCell, ...]:
    cell_start = rows.cell_start[chosen]
    slots = [slot if start else None for slot, start in zip(rows.slots[chosen].tolist(), cell_start.tolist())]
    offsets = (rows.start[chosen] - cell_start).tolist()
    return tuple(map(OpenCell, plan.tail[chosen].tolist(), slots, (cell_start % ring).tolist(), offsets))


def stage_decodes(plan: Plan, rows: RowPositions, ring: int) -> StagedValue:
    count = rows.decodes
    start, cell_start = rows.start[:count], rows.cell_start[:count]
    offset = start - cell_start
    reach = int(offset.max()) + 1
    cells = open_cells(plan, rows, slice(count), ring)
    captures = plan.captures
    captured = [CaptureAt(row, slot) for row, slot in zip(captures.row.tolist(), captures.slot.tolist()) if row < count]
    fields = {
        "rows": count,
        "reach": reach,
        "cells": cells,
        "captures": tuple(captured),
        "any_opens": not offset.all(),
        **dict.fromkeys(("tail", "ring", "previous", "opens", "keys")),
    }
    if count > 1:
        fields |= {
            "tail": plan.tail[:count],
            "ring": start % ring,
            "previous": (start - 1) % ring,
            "opens": offset == 0,
        }
        if any(cell.low for cell in cells):
            fields["keys"] = (cell_start[:, None] + np.arange(reach)) % ring
    return StagedValue(Decodes, fields)


def stage_groups(plan: Plan, rows: RowPositions, spec: MemorySpec, ring: int) -> tuple[StagedValue, ...]:
    """Stage groups of the rows that are not decodes: rows with equally many pieces together, a limited number at a
    time.
    """
    pieces = (rows.end - 1) // spec.cell - rows.start // spec.cell + 1
    order = rows.decodes + np.argsort(-pieces[rows.decodes :], kind="stable")
    some = [order[low : low + GROUP_ROWS] for low in range(0, len(order), GROUP_ROWS)]
    return tuple(stage_group(plan, rows, chosen, pieces[chosen], spec, ring) for chosen in some)


def stage_group(
    plan: Plan, rows: RowPositions, chosen: Longs, pieces: Longs, spec: MemorySpec, ring: int
) -> StagedValue:
    captures: dict[int, list[CaptureAt]] = {}
    place = {row: index for index, row in enumerate(chosen.tolist())}
    for row, position, slot in zip(
        *(field.tolist() for field in (plan.captures.row, plan.captures.position, plan.captures.slot))
    ):
        if row in place:
            rank = (position - 1) // spec.cell - int(rows.start[row]) // spec.cell
            captures.setdefault(rank, []).append(CaptureAt(place[row], slot))
    ranks = tuple(
        stage_rank(
            rows, chosen[pieces > number], spec, number, int((pieces > number + 1).sum()), captures.get(number, [])
        )
        for number in range(int(pieces[0]))
    )
    fields = {
        "rows": len(chosen),
        "cells": open_cells(plan, rows, chosen, ring),
        "ranks": ranks,
        "writes": stage_writes(plan, rows, chosen, spec, ring),
        **dict.fromkeys(("tail", "ring", "previous", "opens", "is_tail")),
    }
    if len(chosen) > 1 and ranks[0].fields["has_tail"]:
        offset = rows.start[chosen] - rows.cell_start[chosen]
        columns = np.arange(ranks[0].fields["reach"])
        fields |= {
            "tail": plan.tail[chosen],
            "ring": (rows.cell_start[chosen][:, None] + columns) % ring,
            "previous": (rows.start[chosen] - 1) % ring,
            "opens": offset == 0,
            "is_tail": columns < offset[:, None],
        }
    return StagedValue(Group, fields)


def stage_rank(
    rows: RowPositions, chosen: Longs, spec: MemorySpec, number: int, continuing: int, captures: list[CaptureAt]
) -> StagedValue:
    """Stage rank `number` of a group; `chosen` are those of its rows that reach this rank."""
    cell_start = rows.cell_start[chosen] + number * spec.cell
    low = np.maximum(rows.start[chosen], cell_start)
    high = np.minimum(rows.end[chosen], cell_start + spec.cell)
    offset, end_offset = low - cell_start, high - cell_start
    first, reach = int(offset.min()), int(end_offset.max())
    fields: dict[str, Any] = {
        "rows": len(chosen),
        "first": first,
        "reach": reach,
        "continuing": continuing,
        "captures": tuple(captures),
        "has_tail": bool(offset.any()),
        "stays": bool((high > earliest_kept(rows, chosen, spec)).any()),
        **dict.fromkeys(("span", "token", "real", "real_token")),
    }
    shift = rows.first[chosen] - rows.start[chosen]
    if len(chosen) == 1:
        return StagedValue(Rank, fields | {"span": (int(low[0] + shift[0]), int(high[0] + shift[0]))})
    columns = np.arange(reach)
    token = shift[:, None] + np.clip(cell_start[:, None] + columns, low[:, None], high[:, None] - 1)
    real = ((columns >= offset[:, None]) & (columns < end_offset[:, None]))[:, first:]
    real_token = token[:, first:][real]
    return StagedValue(Rank, fields | {"token": token.ravel(), "real": np.flatnonzero(real), "real_token": real_token})


def earliest_kept(rows: RowPositions, chosen: Longs, spec: MemorySpec) -> Longs:
    """Return the first position of each row that stays in its tail.

    A later row may start at this row's end, or up to draft_room tokens before, and reads its cell from the start.
    """
    earliest = np.maximum(rows.end[chosen] - spec.draft_room, 0)
    kept: Longs = np.maximum(rows.start[chosen], earliest - earliest % spec.cell)
    return kept


def stage_writes(plan: Plan, rows: RowPositions, chosen: Longs, spec: MemorySpec, ring: int) -> StagedValue:
    low = earliest_kept(rows, chosen, spec)
    positions, owners = ranges(low, rows.end[chosen] - low)
    token = positions + (rows.first - rows.start)[chosen][owners]
    return StagedValue(TailWrites, {"token": token, "tail": plan.tail[chosen][owners], "ring": positions % ring})


def stage_convolution(plan: Plan, rows: RowPositions, spec: MemorySpec, ring: int) -> StagedValue:
    back = ring - spec.draft_room
    longest = int(rows.length.max())
    single = longest == 1
    history = rows.start[:, None] + np.arange(-back, 0)
    low = np.maximum(rows.start, rows.end - spec.draft_room - back)
    kept, owners = (rows.start, slice(None)) if single else ranges(low, rows.end - low)
    fields = {
        "width": back + 1,
        "head": min(back, longest),
        "tail": plan.tail[:, None],
        "tail_ring": history % ring,
        **history_sources(rows, history, back),
        "single": single,
        "lone": (int(plan.tail[0]), int(rows.start[0]) % ring) if single and plan.rows == 1 else None,
        "body": (max(back, rows.decodes), len(plan.tokens)) if longest > back else None,
        **dict.fromkeys(("first_token", "real", "real_token", "keep_token")),
        "keep_tail": plan.tail[owners],
        "keep_ring": kept % ring,
        "captures": len(plan.captures.row),
        **window_captures(plan, rows, back),
    }
    if not single:
        fields |= heads(rows, fields["head"]) | {"keep_token": kept + (rows.first - rows.start)[owners]}
    return StagedValue(Convolution, fields)


def history_sources(rows: RowPositions, history: Longs, back: int) -> dict[str, Any]:
    """Return the source of each of the `back` inputs before a row."""
    names = ("from_tail", "from_state", "read_slot", "state_index")
    cell_start = rows.cell_start[:, None]
    from_tail = history >= cell_start
    if from_tail.all():
        return {"all_tail": True, "any_state": False, **dict.fromkeys(names)}
    from_state = (history >= 0) & ~from_tail
    state_index = np.clip(history - cell_start + back, 0, back - 1)
    sources = zip(names, (from_tail, from_state, rows.slots[:, None], state_index))
    return {"all_tail": False, "any_state": bool(from_state.any()), **dict(sources)}


def heads(rows: RowPositions, head: int) -> dict[str, Longs]:
    """Return the first `head` tokens of each row; a shorter row repeats its last."""
    columns = np.arange(head)
    first_token = rows.first[:, None] + np.minimum(columns, rows.length[:, None] - 1)
    real = columns < rows.length[:, None]
    return {"first_token": first_token, "real": np.flatnonzero(real), "real_token": first_token[real]}


def window_captures(plan: Plan, rows: RowPositions, back: int) -> dict[str, NDArray[Any] | None]:
    """Locate the `back` inputs before each captured position: among the row's new inputs or its earlier ones."""
    if not len(plan.captures.row):
        return dict.fromkeys(("capture_slot", "capture_token", "capture_history", "capture_is_new"))
    row = plan.captures.row.astype(np.int64)
    window = plan.captures.position.astype(np.int64)[:, None] + np.arange(-back, 0) - rows.start[row][:, None]
    return {
        "capture_slot": plan.captures.slot,
        "capture_token": rows.first[row][:, None] + np.maximum(window, 0),
        "capture_history": row[:, None] * back + np.minimum(window, -1) + back,
        "capture_is_new": window >= 0,
    }


def stage_pagings(plan: Plan, rows: RowPositions, spec: MemorySpec) -> dict[str, StagedValue | None]:
    positions, owners = ranges(rows.start, rows.length)
    windows = {memory.window is not None for memory in spec.memories if isinstance(memory, AttentionMemory)}
    none = np.zeros(plan.rows, np.int64)
    full = stage_paging(plan.page_table, none, positions, owners, spec.cell) if False in windows else None
    first = plan.window_first.astype(np.int64)
    windowed = stage_paging(plan.window_table, first, positions, owners, spec.cell) if True in windows else None
    return {"full": full, "windowed": windowed}


def stage_paging(table: Ints, first_cell: Longs, positions: Longs, owners: Longs, cell: int) -> StagedValue:
    page, offset = table[owners, positions // cell - first_cell[owners]], positions % cell
    fields = {
        "write_page": page,
        "write_offset": offset,
        "table": table,
        "first_position": first_cell * cell,
        "lone": (int(page[0]), int(offset[0])) if len(page) == 1 else None,
    }
    return StagedValue(Paging, fields)
