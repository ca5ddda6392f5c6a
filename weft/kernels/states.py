"""States in fewer bits than they are computed with: bfloat16, or integers with a scale for LINES lines of a column.

A state is rounded once, where its cell ends, whether it is captured or not, and everything after reads what was
rounded. So a run that resumes there reads what a cold one has read, and nothing that is not stored goes on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from weft.device.store import RecurrentView
from weft.memory.spec import Part

# Lines of a column that share a scale, and the largest code.
LINES, LARGEST = 32, 127
# Numbers that need a smaller scale are zero: its inverse may not be a float32.
LEAST = 2.0**-100
SCALES = "scales"


def state_parts(name: str, shape: tuple[int, int, int], dtype: str) -> tuple[Part, ...]:
    """Return what a mixer stores of its state, matrices [heads, lines, columns]."""
    heads, lines, columns = shape
    numbers = Part(name, shape, dtype)
    return (numbers, Part(SCALES, (heads, blocks(lines), columns), "bfloat16")) if dtype == "int8" else (numbers,)


def blocks(lines: int) -> int:
    return -(-lines // LINES)


class States(NamedTuple):
    """Some states as they are stored: numbers [states, heads, lines, columns], and the scales of integers."""

    numbers: Shaped[Tensor, "states heads lines columns"]
    scales: Float[Tensor, "states heads blocks columns"] | None

    def read(self, slot: int) -> Float[Tensor, "heads lines columns"]:
        """Return a state; where it is stored in float32, a view of it."""
        return wide(self.numbers[slot], None if self.scales is None else self.scales[slot])

    def wide(self) -> Float[Tensor, "states heads lines columns"]:
        return wide(self.numbers, self.scales)

    def rounded(self, new: Float[Tensor, "new heads lines columns"]) -> States:
        """Return new states as they would be stored here."""
        return States(new.to(self.numbers.dtype), None) if self.scales is None else States(*encoded(new))

    def write(self, slot: int, new: States, number: int) -> None:
        """Store one of some rounded states."""
        self.numbers[slot] = new.numbers[number]
        if self.scales is not None:
            assert new.scales is not None
            self.scales[slot] = new.scales[number]


def states_of(view: RecurrentView, name: str) -> States:
    return States(view.state[name], view.state.get(SCALES))


def wide(
    numbers: Shaped[Tensor, "*any lines columns"], scales: Float[Tensor, "*any blocks columns"] | None
) -> Float[Tensor, "*any lines columns"]:
    return numbers.float() if scales is None else decoded(numbers, scales)


def encoded(
    state: Float[Tensor, "*any lines columns"],
) -> tuple[Int[Tensor, "*any lines columns"], Float[Tensor, "*any blocks columns"]]:
    """Return codes of eight bits, and the scales that they are multiplied with.

    A scale has 8 significant bits, so the largest number is at most 127.25 of it.

    >>> codes, scales = encoded(torch.tensor([[0.5], [-2.54], [0.0]]))
    >>> codes.flatten().tolist(), scales.tolist()
    ([25, -127, 0], [[0.02001953125]])
    """
    lines = state.shape[-2]
    padded = torch.nn.functional.pad(state, (0, 0, 0, -lines % LINES)).unflatten(-2, (-1, LINES))
    scales = (padded.abs().amax(-2) / LARGEST).bfloat16()
    used = scales.float()
    # What holds a number that is none has no codes, and a scale that is none either.
    inverse = torch.where((used >= LEAST) & used.isfinite(), 1.0 / used, 0.0)
    codes = (padded * inverse.unsqueeze(-2)).nan_to_num(0.0).round().to(torch.int8)
    return codes.flatten(-3, -2)[..., :lines, :], scales


def decoded(
    codes: Int[Tensor, "*any lines columns"], scales: Float[Tensor, "*any blocks columns"]
) -> Float[Tensor, "*any lines columns"]:
    each = scales.float().repeat_interleave(LINES, -2)[..., : codes.shape[-2], :]
    return codes.float().mul_(each)
