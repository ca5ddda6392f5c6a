"""Bugs in how engines, and nothing else, name their cells."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.engine import loop
from weft.memory.keys import PrefixIdentity


def plant_identity(patch: pytest.MonkeyPatch, change: Callable[[PrefixIdentity], PrefixIdentity]) -> None:
    """Let engines name the cells of every sequence by another identity."""
    made = loop.Sequence
    patch.setattr(loop, "Sequence", lambda *inputs: made(*inputs[:4], change(inputs[4]), *inputs[5:]))
