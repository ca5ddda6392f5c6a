"""Access of recurrent kernels to cells: packed tokens, tails and states, as views where a single row allows it.

This module only moves values; the kernels give them meaning. Tails are read before they are written, except by
decodes, which write their new token first and then read it with the rest of the cell.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.states import States


def opened(part: Float[Tensor, "tails ring ..."], cell: OpenCell, length: int) -> Float[Tensor, "length ..."]:
    """Return the first `length` tokens of an open cell in a tail; a view, unless they wrap around the ring's end."""
    own = part[cell.tail]
    beyond = cell.low + length - own.shape[0]
    if beyond <= 0:
        return own[cell.low : cell.low + length]
    return torch.cat((own[cell.low :], own[:beyond]))


def append(part: Float[Tensor, "tails ring ..."], cell: OpenCell, value: Tensor) -> Float[Tensor, "n ..."]:
    """Add one decode's new token to its tail; return the open cell, including the new token."""
    part[cell.tail, (cell.low + cell.offset) % part.shape[1]] = value
    return opened(part, cell, cell.offset + 1)


def total_of_one(
    part: Float[Tensor, "tails ring *heads"], cell: OpenCell, step: Float[Tensor, "*heads"]
) -> Float[Tensor, "*heads"]:
    """Return the log decay since the cell's start, including the new token's `step`."""
    return part[cell.tail, (cell.low + cell.offset - 1) % part.shape[1]] + step if cell.offset else step


def append_all(part: Float[Tensor, "tails ring ..."], decodes: Decodes, values: Float[Tensor, "rows ..."]) -> None:
    """Add each decode's new token to its tail."""
    part[decodes.tail, decodes.ring] = values


def open_cells(part: Float[Tensor, "tails ring ..."], decodes: Decodes) -> Float[Tensor, "rows reach ..."]:
    """Return each decode's open cell, including its new token. Beyond a shorter cell's last token, values are
    undefined.
    """
    assert decodes.tail is not None
    if decodes.keys is None:
        return part[:, : decodes.reach].index_select(0, decodes.tail)
    return part[decodes.tail.unsqueeze(1), decodes.keys]


def totals_of_all(
    part: Float[Tensor, "tails ring ..."], decodes: Decodes, step: Float[Tensor, "rows ..."]
) -> Float[Tensor, "rows ..."]:
    """Return the log decay since the start of each decode's cell, including the new tokens' `step`."""
    before = part[decodes.tail, decodes.previous]
    if decodes.any_opens:
        # Never multiply by zero: an unused tail may hold NaN.
        assert decodes.opens is not None
        before.masked_fill_(like(decodes.opens, before), 0.0)
    return before.add_(step)


def gather(rank: Rank, packed: Float[Tensor, "tokens ..."]) -> Float[Tensor, "rows reach ..."]:
    """Return packed values on the columns of a rank's cells; for a rank of one row, only its new tokens."""
    if rank.span is not None:
        return packed[rank.span[0] : rank.span[1]].unsqueeze(0)
    assert rank.token is not None
    return packed.index_select(0, rank.token).view(rank.rows, rank.reach, *packed.shape[1:])


def outputs_only(rank: Rank, columns: Float[Tensor, "rows reach ..."]) -> Float[Tensor, "rows outputs ..."]:
    """Return the result of `gather` on the columns where outputs are computed."""
    return columns if rank.span is not None else columns[:, rank.first :]


def with_tail(
    group: Group, rank: Rank, columns: Float[Tensor, "rows _ ..."], part: Float[Tensor, "tails ring ..."]
) -> Float[Tensor, "rows reach ..."]:
    """Return the result of `gather` with the tail on the columns before a row's new tokens."""
    if not rank.has_tail:
        return columns
    if rank.span is not None:
        return torch.cat((opened(part, group.cells[0], rank.first).unsqueeze(0), columns), 1)
    assert group.tail is not None
    assert group.is_tail is not None
    earlier = part[group.tail.unsqueeze(1), group.ring]
    return torch.where(like(group.is_tail, columns), earlier, columns)


def like(mask: Bool[Tensor, "*leading"], values: Tensor) -> Tensor:
    """Return a mask of the leading dimensions with as many dimensions as the values."""
    return mask.view(*mask.shape, *[1] * (values.dim() - mask.dim()))


def tail_columns(
    group: Group, rank: Rank, part: Float[Tensor, "tails ring ..."]
) -> tuple[Float[Tensor, "rows first ..."] | None, Float[Tensor, "rows outputs ..."] | None]:
    """Return a tail on the columns before all outputs, and on the output columns (valid where `is_tail`)."""
    if not rank.has_tail:
        return None, None
    if rank.span is not None:
        return opened(part, group.cells[0], rank.first).unsqueeze(0), None
    assert group.tail is not None
    earlier = part[group.tail.unsqueeze(1), group.ring]
    return earlier[:, : rank.first] if rank.first else None, earlier[:, rank.first :]


def totals(
    group: Group, rank: Rank, packed: Float[Tensor, "tokens ..."], part: Float[Tensor, "tails ring ..."]
) -> Float[Tensor, "rows reach ..."]:
    """Return the log decay since the cell's start on every column, from the packed tokens' own log decays."""
    steps = gather(rank, packed)
    if not rank.has_tail:
        return steps.cumsum(1)
    if rank.span is not None:
        earlier = opened(part, group.cells[0], rank.first)
        return torch.cat((earlier, earlier[-1] + steps[0].cumsum(0))).unsqueeze(0)
    assert group.opens is not None
    assert group.is_tail is not None
    before = part[group.tail, group.previous]
    before.masked_fill_(like(group.opens, before), 0.0)
    sums = steps.masked_fill_(like(group.is_tail, steps), 0.0).cumsum(1) + before.unsqueeze(1)
    return with_tail(group, rank, sums, part)


def spread(rank: Rank, outputs: Float[Tensor, "rows outputs ..."], packed: Float[Tensor, "tokens ..."]) -> None:
    """Scatter what was computed for new tokens to their places in the pack: the inverse of `gather`."""
    if rank.span is not None:
        packed[rank.span[0] : rank.span[1]] = outputs[0]
    else:
        assert rank.real is not None
        packed[rank.real_token] = outputs.flatten(0, 1).index_select(0, rank.real).to(packed.dtype)


def first_states(group: Group, stored: States) -> Float[Tensor, "rows ..."] | None:
    """Return the states before the rows' first cells, zeros where a sequence begins; None if all do."""
    slots = [cell.slot for cell in group.cells]
    if group.rows == 1:
        return None if slots[0] is None else stored.read(slots[0]).unsqueeze(0)
    if all(slot is None for slot in slots):
        return None
    states = stored.numbers.new_zeros(group.rows, *stored.numbers.shape[1:], dtype=torch.float32)
    for row, slot in enumerate(slots):
        if slot is not None:
            states[row] = stored.read(slot)
    return states


def hand_out(rank: Rank, new: States, stored: States) -> None:
    """Write the captured states at the end of a rank into their slots."""
    for row, slot in rank.captures:
        stored.write(slot, new, row)


def write_tail(group: Group, packed: Float[Tensor, "tokens ..."], part: Float[Tensor, "tails ring ..."]) -> None:
    writes = group.writes
    if len(writes.token):
        part[writes.tail, writes.ring] = packed.index_select(0, writes.token)
