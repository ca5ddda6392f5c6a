"""The model that ships with Weft: its folder, and the name that clients use.

An ordinary checkpoint, loaded like any other. `training/` and docs/lab/weft-small.md describe its origin.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
NAME = "weft-small"


def place_of(model: str | None) -> str:
    """Return the location of a model by its option. A local folder of the same name takes precedence."""
    ours = model is None or (model == NAME and not Path(model).exists())
    return str(FOLDER) if ours else str(model)
