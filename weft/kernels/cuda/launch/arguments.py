"""Groups of arguments that many kernels take, made once: the rows and pieces of a step, and the memory of a layer.

A kernel that takes a group lists all of its parameters, in this order:

    rows      row_start, row_first, row_slot, row_tail, row_closing
    pieces    piece_row, piece_position, piece_slot, first_piece, decodes, pieces
    pages     positions, write_page, page_first, page_bounds, page_list
    memory    state, state_stride, state_scales, then tail_NAME, tail_NAME_stride for each part of the mixer's tail
    window    the same of a convolution, without scales
    cache     key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.device.store import AttentionView, RecurrentView
from weft.kernels.cuda.launch.launching import Arguments, named
from weft.kernels.interface import Batch
from weft.kernels.states import SCALES

# They lie in a step's upload at varying addresses, and their numbers vary: neither must be compiled in.
UPLOADED = (
    "row_start", "row_first", "row_slot", "row_tail", "row_closing", "piece_row", "piece_position", "piece_slot",
    "first_piece", "positions", "write_page", "page_first", "page_bounds", "page_list",
    "page_place", "member_token",
)  # fmt: skip
COUNTS = ("rows", "decodes", "pieces", "shares", "least_cells", "run")
STEP: dict[str, Any] = {"do_not_specialize": COUNTS, "do_not_specialize_on_alignment": UPLOADED}

CONVOLUTION = "conv"


def rows_of(batch: Batch) -> Arguments:
    found: Arguments | None = batch.derived.get("rows")
    if found is None:
        found = batch.derived["rows"] = named(
            row_start=batch.start,
            row_first=batch.first,
            row_slot=batch.slot,
            row_tail=batch.tail,
            row_closing=batch.closing,
        )
    return found


def short_tokens(batch: Batch, most: int) -> int:
    """Return the most tokens of a short row, or 0 if rows are longer on average: few of them would be short."""
    rows = batch.rows - batch.decodes
    return most if batch.tokens - batch.decodes <= rows * most else 0


def is_rounded(view: RecurrentView) -> bool:
    """Return whether states are stored in fewer bits than they are computed with."""
    return view.state[_state_of(view)].dtype != torch.float32


def short_room(cell: int, ring: int, view: RecurrentView) -> int:
    """Return the most tokens of a short row with those before it in its cell: its tail holds them, and it ends at most
    one cell. No token of it comes after a state that is rounded, as all are computed from the one before it."""
    return cell if is_rounded(view) else min(ring, 2 * cell - 1)


def records_drafts(batch: Batch, most: int) -> bool:
    """Return whether a step is recorded for rows of at most `most` tokens, padding aside.

    Kernels that only such steps launch are compiled with them, and never while a request waits.
    """
    return batch.host is None and batch.longest <= most


def pieces_of(batch: Batch) -> Arguments:
    found: Arguments | None = batch.derived.get("pieces")
    if found is None:
        found = batch.derived["pieces"] = named(
            piece_row=batch.piece_row,
            piece_position=batch.piece_position,
            piece_slot=batch.piece_slot,
            first_piece=batch.first_piece,
            decodes=batch.decodes,
            pieces=batch.pieces,
        )
    return found


def pages_of(batch: Batch, view: AttentionView) -> Arguments:
    key = "pages" if view.window is None else "pages of windows"
    found: Arguments | None = batch.derived.get(key)
    if found is None:
        listed = batch.pages(view.window)
        found = batch.derived[key] = named(
            positions=batch.positions,
            write_page=listed.write_page,
            page_first=listed.first_position,
            page_bounds=listed.bounds,
            page_list=listed.pages,
        )
    return found


def memory_of(view: RecurrentView) -> Arguments:
    """Return a recurrent mixer's state and tail, without those of the convolution before it."""
    found: Arguments | None = view.derived.get("memory")
    if found is None:
        state, scales = view.state[_state_of(view)], view.state.get(SCALES)
        # Kernels know one stride.
        assert scales is None or scales.stride(0) * scales.itemsize == state.stride(0) * state.itemsize
        tails = [name for name in view.tail if name != CONVOLUTION]
        found = view.derived["memory"] = _memory(view, state, tails, state_scales=scales)
    return found


def _state_of(view: RecurrentView) -> str:
    names = [name for name in view.state if name not in (CONVOLUTION, SCALES)]
    assert len(names) == 1, "a mixer has one state"
    return names[0]


def window_of(view: RecurrentView) -> Arguments:
    """Return the state and tail of a convolution."""
    found: Arguments | None = view.derived.get("window")
    if found is None:
        found = view.derived["window"] = _memory(view, view.state[CONVOLUTION], [CONVOLUTION])
    return found


def _memory(view: RecurrentView, state: Tensor, tails: list[str], **more: Any) -> Arguments:
    given: dict[str, Any] = {"state": state, "state_stride": state.stride(0), **more}
    for name in tails:
        given |= {f"tail_{name}": view.tail[name], f"tail_{name}_stride": view.tail[name].stride(0)}
    return named(**given)


def cache_of(view: AttentionView) -> Arguments:
    found: Arguments | None = view.derived.get("cache")
    if found is None:
        assert view.keys.stride() == view.values.stride()
        found = view.derived["cache"] = named(
            key_pages=view.keys,
            value_pages=view.values,
            page_stride=view.keys.stride(0),
            key_exponents=view.key_exponents,
            value_exponents=view.value_exponents,
            exponent_stride=0 if view.key_exponents is None else view.key_exponents.stride(0),
        )
    return found
