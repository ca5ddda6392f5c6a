"""Layouts of weights that only CPUs read."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from weft.kernels.formats.rounded import INTEGERS
from weft.kernels.formats.stored import Layout, Stored

# Panels of 32 outputs for our own kernels; blocks for oneDNN; or one of these layouts beside panels for few rows.
PANELS = Layout("panels")
BLOCKS = Layout("blocks")
BLOCKS_AND_PANELS = Layout("blocks and panels")
DENSE_AND_PANELS = Layout("dense and panels")


@dataclass(frozen=True, slots=True)
class StoredPanels(Layout):
    """Panels of 32 outputs of a format, as stored.h reads them: bytes [panels, bytes of a panel].

    `are_rounded`: rows are rounded to integers (`formats/rounded.py`), and sums of products are integers. `columns`:
    inputs with one scale, of FP8 and of groups.
    """

    kind: int
    are_rounded: bool
    columns: int = 0

    @property
    def rows_in(self) -> str | None:
        return INTEGERS if self.are_rounded else None


def as_panels(stored: Stored, panels: Float[Tensor, "*many panels inputs 32"]) -> Stored:
    """Return a matrix of which these are the panels."""
    return Stored(PANELS, (panels,), stored.outputs, stored.inputs)


def panels_of(stored: Stored) -> Float[Tensor, "*many panels inputs 32"] | None:
    """Return the panels of a matrix, if it has any."""
    if stored.format is PANELS:
        return stored.tensors[0]
    return stored.tensors[1] if stored.format in (BLOCKS_AND_PANELS, DENSE_AND_PANELS) else None
