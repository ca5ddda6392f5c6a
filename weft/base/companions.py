"""What goes on beside the steps: copies between tiers, drops of prefixes, exchange of prefixes with other engines."""

from __future__ import annotations

from typing import Any


class Companion:
    """The engine calls all companions at the same points of a step, in a fixed order. None of them delays a step."""

    @property
    def busy(self) -> bool:
        """Whether the engine must step on for it, even without requests."""
        return False

    def land(self) -> None:
        """Take in what has ended since the last step. All companions do before the first one launches more."""

    def launch(self) -> None:
        """Begin what comes next. The plan of the step, which may evict what ended in the last one, comes after it."""

    def launched(self, step: Any, flight: Any) -> None:
        """Use what a step in flight computes."""

    def attend(self, idle: bool) -> None:
        """Go on beside the step in flight. If `idle`, there is none: wait a little for what is under way."""

    def landed(self, step: Any) -> None:
        """Take note of a step that was settled, before its sequences get their tokens."""

    def close(self) -> None:
        """Complete what must not be left behind. The engine computes no further step."""
