"""The model that comes with Weft: where it lies, and what clients call it.

An ordinary checkpoint, loaded like any other. How it came to be: `training/` and docs/model.md.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
NAME = "weft-small"


def place_of(model: str | None) -> str:
    """Where a model is to be found, by the option of that name. A folder called like ours goes first."""
    ours = model is None or (model == NAME and not Path(model).exists())
    return str(FOLDER) if ours else str(model)
