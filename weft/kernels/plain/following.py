"""Drafts verified on the device, and rows that follow them, in place: what `weft.base.completion` does with plans."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from weft.kernels.following import DraftSamples, FollowingRows
from weft.kernels.interface import NO_SLOT, Batch, PageList


def verify_drafts(
    tokens: Int[Tensor, " samples"],
    inputs: Int[Tensor, " tokens"],
    rows: DraftSamples,
    board: Int[Tensor, " seats"],
    refused: Int[Tensor, " seats"],
) -> None:
    place = torch.arange(rows.most, device=tokens.device)
    chosen = tokens[(rows.sample[:, None] + place).clamp(max=len(tokens) - 1)]
    draft = inputs[(rows.token[:, None] + 1 + place).clamp(max=len(inputs) - 1)]
    right = ((chosen == draft) & (place < rows.count[:, None])).long().cumprod(1).sum(1)
    seat, has_drafts = rows.seat.long(), rows.count > 0
    board[seat] = torch.where(has_drafts, tokens[rows.sample + right].to(board.dtype), board[seat])
    refused[seat] = torch.where(has_drafts, (rows.count - right).to(refused.dtype), refused[seat])


def move_rows(
    batch: Batch,
    rows: FollowingRows,
    seat: Int[Tensor, " rows"],
    refused: Int[Tensor, " seats"],
    moved: Int[Tensor, " seats"],
) -> None:
    seat, follows = seat.long(), rows.unverified > 0
    by = torch.where(follows, refused[seat], 0).to(batch.start.dtype)
    moved[seat] = by.to(moved.dtype)
    start = batch.start - by
    batch.slot.copy_(torch.where(start // batch.cell < batch.start // batch.cell, rows.earlier_slot, batch.slot))
    batch.start.copy_(start)
    token = torch.arange(batch.tokens, device=start.device)
    owner = torch.searchsorted(batch.first[1:].long(), token, right=True)
    place = token - batch.first[owner]
    batch.positions.copy_(torch.where(follows[owner], start[owner] + place, batch.positions))
    if batch.rotary is not None:
        batch.rotary.sub_(by[owner])
    line = (owner - batch.decodes) * rows.width + rows.unverified[owner] - by[owner] + place - 1
    drafts = rows.drafts[line.clamp(0, len(rows.drafts) - 1)]
    batch.token_ids.copy_(torch.where(follows[owner] & (place > 0), drafts, batch.token_ids))
    for listed in (batch.full, batch.windowed):
        if listed is not None:
            move_pages(listed, batch, owner, follows[owner])
    cut_again(batch, rows)


def move_pages(listed: PageList, batch: Batch, owner: Int[Tensor, " tokens"], follows: Tensor) -> None:
    """Write the tokens of moved rows to the pages of their positions."""
    place = listed.bounds[owner] + (batch.positions - listed.first_position[owner]) // batch.cell
    page = listed.pages[place.clamp(max=len(listed.pages) - 1).long()]
    listed.write_page.copy_(torch.where(follows, page, listed.write_page))


def cut_again(batch: Batch, rows: FollowingRows) -> None:
    """Cut moved rows at the grid. If any row follows, there are no prompts: rows are shorter than a cell."""
    cell, long = batch.cell, slice(batch.decodes, None)
    start, end = batch.start[long], batch.start[long] + batch.first.diff()[long]
    ends = ((end + cell - 1) // cell - start // cell).cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends])
    number = torch.arange(batch.pieces, device=start.device)
    # Pieces that are left lie beyond the end of the last row, which is padding.
    owner = torch.searchsorted(ends, number, right=True).clamp(max=len(ends) - 1)
    position = (start[owner] // cell + number - begins[owner]) * cell
    slot = torch.where(position + cell <= end[owner], rows.capture[long][owner], NO_SLOT)
    any_follows = (rows.unverified > 0).any()
    for known, found in (
        (batch.piece_row, owner + batch.decodes),
        (batch.piece_position, position),
        (batch.piece_slot, slot),
        (batch.first_piece, begins),
    ):
        known.copy_(torch.where(any_follows, found.to(known.dtype), known))
