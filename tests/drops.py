"""Drops in tests: begin one, and step until it is complete."""

from __future__ import annotations

from typing import Any

from weft.engine.loop import Engine


def drop(engine: Engine, tenant: bytes | None = None, prefix: bytes | None = None) -> dict[str, Any]:
    """Return the answer of a drop, for which an engine may have to step."""
    engine.begin_drop(0, tenant, prefix)
    while not (answers := engine.take_dropped()):
        engine.step()
    return answers[0]
