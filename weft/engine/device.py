"""What the engine needs of whatever executes plans: a GPU, a CPU, a simulator, a test."""

from __future__ import annotations

from typing import Any, Protocol

from weft.base.plan import Landing, Plan


class Device(Protocol):
    """Plans are executed whole and in the order of their launch. A flight is the device's own affair."""

    def launch(self, plan: Plan) -> Any: ...

    def land(self, flight: Any) -> Landing: ...
