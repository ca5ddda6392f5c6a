"""The rules of the project are checked on the syntax trees of all its files, which stay for the next test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """Let the garbage collector not walk these trees again and again: that takes longer than to parse all files."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
