"""Defers Ctrl-C while the engine is being changed. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class InterruptLater:
    """Defers Ctrl-C to the end of the block, however often it is pressed.

    A step that is interrupted halfway leaves the engine in a state that cannot be trusted, so no interrupt may reach
    it. Repeated ones count as one.
    """

    def __enter__(self) -> None:
        self._pending = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._pending:
                self._previous(signal.SIGINT, None)
