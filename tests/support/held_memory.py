"""Counts what an object holds: entries of every container that can be reached from it, by class and attribute."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np

Name = str


def held(root: object) -> Counter[Name]:
    """Return the entries of the containers below an object of Weft, those of its modules, and the number of objects.

    Containers in containers count for the attribute that holds the outermost one. An array counts as one entry.
    """
    found: Counter[Name] = Counter()
    seen: set[int] = set()
    left: list[tuple[Name, Any]] = [("root", root), *module_values(found)]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray | bytearray):
            found[name] += 1
        elif isinstance(value, dict):
            found[name] += len(value)
            left += ((name, each) for pair in value.items() for each in pair)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            found[name] += len(value)
            left += ((name, each) for each in value)
        elif is_ours(value):
            found[type(value).__qualname__] += 1
            left += attributes(value)
    return found


def is_ours(value: object) -> bool:
    return type(value).__module__.startswith("weft.") and not isinstance(value, type | Enum)


def attributes(value: object) -> Iterator[tuple[Name, Any]]:
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    for name in {*getattr(value, "__dict__", {}), *slots}:
        if hasattr(value, name):
            yield f"{type(value).__qualname__}.{name}", getattr(value, name)


def _names(slots: str | tuple[str, ...]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def module_values(found: Counter[Name]) -> Iterator[tuple[Name, Any]]:
    """Yield the containers of all modules of Weft, and count what their functions have cached."""
    for module, loaded in list(sys.modules.items()):
        if module.startswith("weft."):
            for name, value in list(vars(loaded).items()):
                if hasattr(value, "cache_info") and getattr(value, "__module__", None) == module:
                    found[f"{module}.{name}()"] += value.cache_info().currsize
                elif isinstance(value, dict | list | set | deque) and not name.startswith("__"):
                    yield f"{module}.{name}", value
