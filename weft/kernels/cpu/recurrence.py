"""The walk of a recurrence over a step's cells: what all recurrent mixers share.

A mixer (`Recurrence`) contributes its equations: the outputs of one token (`decode_one`, `decode_all`), the outputs of
a cell's columns (`pass_cell`), and the state at a cell's end (`advance`). This module knows where tokens, tails, states
and captures lie, and calls them in order.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cpu.cells import first_states, hand_out, opened, spread, totals, write_tail
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.interface import Batch
from weft.kernels.states import states_of

# The parts of a tail on the columns of some cells, by name: [rows, reach, *shape].
Columns = dict[str, Float[Tensor, "rows reach ..."]]


@runtime_checkable
class Recurrence(Protocol):
    """A mixer's inputs for the tokens of a pack, and its equations. `name` is that of its state."""

    name: str
    steps: Float[Tensor, "tokens ..."]  # log decay of each token

    def empty_outputs(self) -> Float[Tensor, "tokens heads size"]:
        """Return room for the outputs of all tokens."""

    def first(self, count: int) -> Recurrence:
        """Return the mixer for the leading tokens only."""

    def given(self) -> dict[str, Float[Tensor, "tokens ..."]]:
        """Return the parts of a tail that are inputs; `pass_cell` computes the others."""

    def decode_one(self, cell: OpenCell, view: RecurrentView) -> Float[Tensor, "heads size"]:
        """Append the only token to its tail; return its output."""

    def decode_all(self, decodes: Decodes, view: RecurrentView) -> Float[Tensor, "rows heads size"]:
        """Append each row's token to its tail; return the outputs."""

    def pass_cell(
        self,
        group: Group,
        rank: Rank,
        state: Tensor | None,
        total: Float[Tensor, "rows reach ..."],
        view: RecurrentView,
    ) -> tuple[Float[Tensor, "rows outputs heads size"], Columns]:
        """Return the outputs of a rank, and all its columns. `total` is the log decay since the cell's start."""

    def advance(self, state: Tensor | None, columns: Columns) -> Tensor:
        """Return the states at the end of a cell; no state is zeros."""


def scan(mixer: Recurrence, batch: Batch, view: RecurrentView) -> Float[Tensor, "tokens heads size"]:
    """Return the outputs of all rows; write tails and captured states."""
    chosen = indices(batch)
    if not chosen.groups:
        assert chosen.decodes is not None
        return decode(mixer, chosen.decodes, view)
    y = mixer.empty_outputs()
    if chosen.decodes is not None:
        y[: batch.decodes] = decode(mixer.first(batch.decodes), chosen.decodes, view)
    for group in chosen.groups:
        extend(mixer, y, group, view)
    return y


def decode(mixer: Recurrence, decodes: Decodes, view: RecurrentView) -> Float[Tensor, "rows heads size"]:
    """Compute rows of one token each."""
    is_one = decodes.rows == 1
    y = mixer.decode_one(decodes.cells[0], view).unsqueeze(0) if is_one else mixer.decode_all(decodes, view)
    stored = states_of(view, mixer.name)
    for row, slot in decodes.captures:
        cell = decodes.cells[row]
        names = (*mixer.given(), *computed(mixer, view))
        columns = {name: opened(view.tail[name], cell, cell.offset + 1).unsqueeze(0) for name in names}
        before = None if cell.slot is None else stored.read(cell.slot).unsqueeze(0)
        stored.write(slot, stored.rounded(mixer.advance(before, columns)), 0)
    return y


def extend(mixer: Recurrence, y: Float[Tensor, "tokens heads size"], group: Group, view: RecurrentView) -> None:
    """Compute rows of several tokens, a cell at a time; write outputs to `y`."""
    stored = states_of(view, mixer.name)
    state = first_states(group, stored)
    kept = {name: empty_like_tail(view.tail[name], len(mixer.steps)) for name in computed(mixer, view)}
    for rank in group.ranks:
        total = totals(group, rank, mixer.steps, view.tail["decay"])
        outputs, columns = mixer.pass_cell(group, rank, state, total, view)
        spread(rank, outputs, y)
        if rank.stays:
            for name, packed in kept.items():
                spread(rank, columns[name][:, rank.first :], packed)
        if rank.continuing or rank.captures:
            # What the next cell reads is what a slot would hold.
            rounded = stored.rounded(mixer.advance(state, columns))
            hand_out(rank, rounded, stored)
            state = rounded.wide()[: rank.continuing]
    for name, packed in (mixer.given() | kept).items():
        write_tail(group, packed, view.tail[name])


def computed(mixer: Recurrence, view: RecurrentView) -> list[str]:
    """Return the names of a tail's parts that are known only after a cell was passed."""
    return [name for name in view.tail if name != "conv" and name not in mixer.given()]


def empty_like_tail(part: Float[Tensor, "tails ring ..."], tokens: int) -> Float[Tensor, "tokens ..."]:
    return part.new_empty(tokens, *part.shape[2:])
