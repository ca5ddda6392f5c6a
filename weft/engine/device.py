"""The engine's interface to the executor of plans: a GPU, a CPU, a simulator, a test."""

from __future__ import annotations

from typing import Any, Protocol

from weft.base.plan import Landing, Plan


class Device(Protocol):
    """Executes plans whole and in the order of their launch. Flights are opaque to the engine."""

    def launch(self, plan: Plan) -> Any: ...

    def land(self, flight: Any) -> Landing: ...
