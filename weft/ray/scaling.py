"""How many replicas the load asks for. Ray Serve applies bounds and delays, and asks every fraction of a second."""

from __future__ import annotations

from typing import Any, Protocol

from weft.backends.output_stream import OutputStream
from weft.engine.request import Request
from weft.ray.settings import Autoscaling
from weft.start.launch import Running

LOAD = "weft_load"


class QueueMeter:
    """A backend that also knows the length of its queue. Everything but `submit` is the inner backend's own."""

    def __init__(self, inner: Running) -> None:
        self._inner = inner
        self._waiting: dict[OutputStream, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def submit(self, request: Request) -> OutputStream:
        stream = await self._inner.submit(request)
        self._waiting[stream] = len(request.prompt)
        if len(self._waiting) > 2 * self._inner.open + 64:
            self._forget_begun()
        return stream

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens of requests without an output."""
        self._forget_begun()
        return sum(self._waiting.values())

    def _forget_begun(self) -> None:
        self._waiting = {stream: tokens for stream, tokens in self._waiting.items() if stream.waits}


def load_of(open_requests: int, waiting_tokens: int, targets: Autoscaling) -> float:
    """Return how many replicas the work of one replica would occupy.

    >>> load_of(16, 0, Autoscaling(target_open=32)), load_of(1, 4000, Autoscaling(target_waiting_tokens=1000))
    (0.5, 4.0)
    """
    return max(open_requests / targets.target_open, waiting_tokens / targets.target_waiting_tokens)


class ScalingContext(Protocol):
    """The part of Ray Serve's `AutoscalingContext` that counts here."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]] | None: ...


def wanted_replicas(context: ScalingContext) -> tuple[float, dict[str, Any]]:
    """Return the sum of the replicas' loads; without any report, the number of replicas that there are."""
    loads = (context.aggregated_metrics or {}).get(LOAD)
    return (sum(loads.values()), {}) if loads else (context.target_num_replicas, {})
