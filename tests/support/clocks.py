"""Clocks in the hands of a test: engines that measure their steps by them plan the same on every machine."""

from __future__ import annotations

TICK_SECONDS = 1e-3


class Ticks:
    """A clock that moves on by the same time whenever it is read: all steps take equally long, with drafts or not."""

    def __init__(self) -> None:
        self._reads = 0

    def __call__(self) -> float:
        self._reads += 1
        return self._reads * TICK_SECONDS
