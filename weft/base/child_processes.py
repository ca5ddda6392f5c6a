"""What child processes need from this one."""

from __future__ import annotations

import os
from pathlib import Path

import weft


def child_environment() -> dict[str, str]:
    """Return this process's environment, with the path on which a child process finds the same Weft."""
    root = str(Path(weft.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if not path else root + os.pathsep + path}
