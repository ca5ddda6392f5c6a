"""Drafts verified on the device, and the rows that follow them: the first and the last kernels of a recorded step.

Nothing may start before them, so they do not let later kernels start early.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from weft.kernels.cuda.launch.launching import Arguments, jit, named, power_of_two
from weft.kernels.following import DraftSamples, FollowingRows
from weft.kernels.interface import NO_SLOT, Batch, PageList

__all__ = ["move_rows", "verify_drafts"]

NOTHING = tl.constexpr(NO_SLOT)
# Steps with fewer drafts share a kernel.
LEAST_DRAFTS = 8


def verify_drafts(
    tokens: Int[Tensor, " samples"],
    inputs: Int[Tensor, " tokens"],
    rows: DraftSamples,
    board: Int[Tensor, " seats"],
    refused: Int[Tensor, " seats"],
) -> None:
    """Leave on the board the sample after the last right draft of each row, and how many were wrong."""
    verify_kernel[(len(rows.seat),)](
        named(
            tokens=tokens, inputs=inputs, seat=rows.seat, row_token=rows.token, row_sample=rows.sample,
            row_count=rows.count, board=board, refused=refused,
        ),
        MOST=power_of_two(max(LEAST_DRAFTS, rows.most)), num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize_on_alignment=["seat", "row_token", "row_sample", "row_count", "tokens", "inputs"])
def verify_kernel(tokens, inputs, seat, row_token, row_sample, row_count, board, refused, MOST: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    place = tl.arange(0, MOST)
    count, sample = tl.load(row_count + row), tl.load(row_sample + row)
    real = place < count
    chosen = tl.load(tokens + sample + place, real, 0)
    draft = tl.load(inputs + tl.load(row_token + row) + 1 + place, real, 0)
    wrong = tl.where(real & (chosen.to(tl.int64) != draft.to(tl.int64)), place, count)
    right = tl.min(wrong, 0)
    if count > 0:
        own = tl.load(seat + row)
        tl.store(board + own, tl.load(tokens + sample + right).to(board.dtype.element_ty))
        tl.store(refused + own, (count - right).to(refused.dtype.element_ty))


def move_rows(
    batch: Batch,
    rows: FollowingRows,
    seat: Int[Tensor, " rows"],
    refused: Int[Tensor, " seats"],
    moved: Int[Tensor, " seats"],
) -> None:
    """Let the rows of a step start where the drafts before them turned out to end."""
    longer = batch.rows - batch.decodes
    followed = named(
        unverified=rows.unverified, earlier_slot=rows.earlier_slot, capture=rows.capture, drafts=rows.drafts,
        width=rows.width, seat=seat, refused=refused, moved=moved,
    )  # fmt: skip
    step = named(
        row_start=batch.start, row_first=batch.first, row_slot=batch.slot, token_ids=batch.token_ids,
        positions=batch.positions, rotary=batch.rotary, decodes=batch.decodes, rows=batch.rows,
    )  # fmt: skip
    most = power_of_two(rows.width)
    place_kernel[(batch.rows,)](
        followed, step, _pages("full", batch.full), _pages("windowed", batch.windowed),
        CELL=batch.cell, MOST=most, num_warps=1,
    )  # fmt: skip
    cut_kernel[(1,)](
        followed, step,
        named(
            piece_row=batch.piece_row, piece_position=batch.piece_position, piece_slot=batch.piece_slot,
            first_piece=batch.first_piece, pieces=batch.pieces,
        ),
        CELL=batch.cell, ROWS=power_of_two(longer), PIECES=power_of_two(batch.pieces), num_warps=4,
    )  # fmt: skip


def _pages(name: str, listed: PageList | None) -> Arguments:
    parts = ("write_page", "first_position", "bounds", "pages")
    return named(**{f"{name}_{part}": None if listed is None else getattr(listed, part) for part in parts})


@triton.jit
def move_pages(write_page, first_position, bounds, pages, row, token, position, real, CELL: tl.constexpr):
    """Write tokens to the pages of their positions."""
    place = tl.load(bounds + row) + (position - tl.load(first_position + row)) // CELL
    tl.store(write_page + token, tl.load(pages + place, real, 0), real)


@jit(do_not_specialize=["decodes", "rows"])
def place_kernel(
    unverified, earlier_slot, capture, drafts, width, seat, refused, moved,
    row_start, row_first, row_slot, token_ids, positions, rotary, decodes, rows,
    full_write_page, full_first_position, full_bounds, full_pages,
    windowed_write_page, windowed_first_position, windowed_bounds, windowed_pages,
    CELL: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (row). A row that does not follow, or has no wrong draft before it, stays."""
    row = tl.program_id(0)
    count, place = tl.load(unverified + row), tl.arange(0, MOST)
    by = tl.where(count > 0, tl.load(refused + tl.load(seat + row)), 0).to(tl.int32)
    tl.store(moved + tl.load(seat + row), by.to(moved.dtype.element_ty))
    if by > 0:
        planned, first = tl.load(row_start + row), tl.load(row_first + row)
        start = planned - by
        real = place < tl.load(row_first + row + 1) - first
        if start // CELL < planned // CELL:
            tl.store(row_slot + row, tl.load(earlier_slot + row))
        tl.store(row_start + row, start)
        tl.store(positions + first + place, start + place, real)
        if rotary is not None:
            tl.store(rotary + first + place, tl.load(rotary + first + place, real, 0) - by, real)
        draft = drafts + (row - decodes) * width + count - by + place - 1
        is_draft = real & (place > 0)
        tl.store(token_ids + first + place, tl.load(draft, is_draft, 0), is_draft)
        if full_pages is not None:
            move_pages(
                full_write_page, full_first_position, full_bounds, full_pages, row, first + place, start + place,
                real, CELL,
            )  # fmt: skip
        if windowed_pages is not None:
            move_pages(
                windowed_write_page, windowed_first_position, windowed_bounds, windowed_pages, row, first + place,
                start + place, real, CELL,
            )  # fmt: skip


@jit(do_not_specialize=["decodes", "rows", "pieces"])
def cut_kernel(
    unverified, earlier_slot, capture, drafts, width, seat, refused, moved,
    row_start, row_first, row_slot, token_ids, positions, rotary, decodes, rows,
    piece_row, piece_position, piece_slot, first_piece, pieces,
    CELL: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Cut all rows of several tokens at the grid again, if any of them follows.

    Then there are no prompts: a row has one piece or two, and one capture at most. The last row is padding, and has all
    pieces that are left.
    """
    own = tl.arange(0, ROWS)
    row, real = decodes + own, own < rows - decodes
    if tl.max(tl.load(unverified + row, real, 0), 0) > 0:
        start = tl.load(row_start + row, real, 0)
        end = start + tl.load(row_first + row + 1, real, 0) - tl.load(row_first + row, real, 0)
        # The last row may have no token, and then has no piece.
        count = tl.where(real, (end + CELL - 1) // CELL - start // CELL, 0)
        ends = tl.cumsum(count, 0)
        begin = ends - count
        tl.store(first_piece + own, begin, real)
        last = row == rows - 1
        tl.store(first_piece + own + 1, ends, last)
        slot = tl.load(capture + row, real, NOTHING)
        for number in tl.static_range(2):
            place = begin + number
            here = real & (number < count) & (row < rows - 1)
            cell = (start // CELL + number) * CELL
            tl.store(piece_row + place, row, here)
            tl.store(piece_position + place, cell, here)
            tl.store(piece_slot + place, tl.where(cell + CELL <= end, slot, NOTHING), here)
        rest = tl.sum(tl.where(last & real, begin, 0), 0)
        piece = tl.arange(0, PIECES)
        left = (piece >= rest) & (piece < pieces)
        tl.store(piece_row + piece, rows - 1, left)
        tl.store(piece_position + piece, (piece - rest) * CELL, left)
        tl.store(piece_slot + piece, NOTHING, left)
