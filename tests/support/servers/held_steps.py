"""Time in the hands of a test: steps of engines that wait until they may go on, and waiting for what must come.

Engines of this process only. How long anything takes on this machine must never decide what a test finds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from weft.engine.events import Output
from weft.engine.loop import Engine

# Far more than anything takes, the first use of kernels that have to be compiled included.
SECONDS = 300


class HeldSteps:
    """Holds steps of all engines back from when it is told to until it is told to let them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Engine | None = None
        # The engine's numbers of sequences, in the order of their ends.
        self.ended: list[int] = []
        self._hold, self._held, self._go = threading.Event(), threading.Event(), threading.Event()
        step = Engine.step

        def holding(engine: Engine) -> list[Output]:
            self.engine = engine
            if self._hold.is_set():
                self._held.set()
                assert self._go.wait(SECONDS)
            outputs = step(engine)
            self.ended += [output.sequence for output in outputs if output.finish is not None]
            return outputs

        monkeypatch.setattr(Engine, "step", holding)

    def hold(self) -> None:
        """From now on no step begins."""
        self._hold.set()

    def wait_held(self) -> None:
        """Until one would begin; it began after everything that was asked for before it was taken."""
        assert self._held.wait(SECONDS)

    def release(self) -> None:
        self._hold.clear()
        self._go.set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
