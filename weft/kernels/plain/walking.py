"""Walk of a recurrence over a row: from the checkpoint, over the open cell's tail, over the new tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.plain.rows import rows_of_step
from weft.kernels.states import states_of

# Maps a state and one token's contribution (the parts of a tail, by name) to the next state.
Advance = Callable[[Tensor, dict[str, Tensor]], Tensor]


def walk(name: str, brought: dict[str, Tensor], batch: Batch, view: RecurrentView, advance: Advance) -> list[Tensor]:
    """Return the state `name` after every token of the pack; write tails and captured states.

    At the end of a cell a state is rounded, for all tokens after it.

    `brought` holds each token's contribution. A tail keeps it, for later rows that start at the checkpoint.
    """
    states: list[Tensor] = [torch.empty(0)] * batch.tokens
    stored = states_of(view, name)
    for row in rows_of_step(batch):
        state = stored.numbers.new_zeros(stored.numbers.shape[1:], dtype=torch.float32)
        if row.slot is not None:
            state = stored.read(row.slot)
        for position in range(row.cell_start, row.start):
            state = advance(state, {key: tail[row.tail, position % tail.shape[1]] for key, tail in tails(view)})
        for position in range(row.start, row.end):
            token = {key: values[row.packed(position)] for key, values in brought.items()}
            for key, tail in tails(view):
                tail[row.tail, position % tail.shape[1]] = token[key]
            state = states[row.packed(position)] = advance(state, token)
            if (position + 1) % batch.cell == 0:
                rounded = stored.rounded(state.unsqueeze(0))
                state = rounded.wide()[0]
                if position + 1 in row.captures:
                    stored.write(row.captures[position + 1], rounded, 0)
    return states


def tails(view: RecurrentView) -> list[tuple[str, Tensor]]:
    """Return the parts of a tail that belong to the recurrence: all but the convolution's."""
    return [(key, tail) for key, tail in view.tail.items() if key != "conv"]
