"""The engine as the front sees it, whether it runs in a process of its own or in a thread of this one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.engine.events import Output, Report
from weft.engine.request import Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served: enough for routes, first lines and reports."""

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_length: int
    memory_bytes: int
    memory_tokens: int  # how many tokens of one long sequence that is
    max_sequences: int
    settings: dict[str, Any] = field(default_factory=dict)


class Stream(Protocol):
    """One request under way: its outputs as they come. After the last one `report` is there.

    The last output has a `finish`; then iteration ends. If the engine dies, or a shutdown waits no longer, it raises
    `EngineStopped` instead, after what came before. One task reads a stream, once.
    """

    id: int
    report: Report | None

    def __aiter__(self) -> AsyncIterator[list[Output]]: ...


class Backend(Protocol):
    """All methods are for the event loop's thread.

    Errors of requests are `RequestError` (429: too many are under way), those of the engine `EngineStopped`.
    """

    info: ModelInfo

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float) -> None:
        """Take no more requests, let running ones finish for so long, then end the rest with an error."""

    @property
    def healthy(self) -> bool: ...

    async def submit(self, request: Request) -> Stream:
        """Hand a request over; raises at once if it cannot be served."""
        ...

    def abort(self, stream: Stream) -> None:
        """The client is gone: memory is free within a step. Ended streams are left alone."""

    def finish(self, stream: Stream) -> None:
        """A stop string was found in the text: end as if the model had stopped. A last output and the report follow."""

    async def flush(self) -> int:
        """Forget everything that no running sequence uses; how many cached tokens are left."""
        ...

    async def stats(self) -> dict[str, Any]:
        """A snapshot for metrics, by name: `Service.stats`, `Engine.stats` and `memory_stats` together."""
        ...

    async def cache_report(self, limit: int) -> dict[str, Any]:
        """The largest shared prefixes with their resume points, bytes, age and hits."""
        ...

    async def wait_failed(self) -> str:
        """Returns when the engine is gone for good without having been asked to go; why."""
        ...
