"""The engine as the front sees it, in its own process or in a thread of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from weft.backends.output_stream import OutputStream
from weft.engine.protocol import EngineNews
from weft.engine.request import Request
from weft.engine.tracing.events import TraceBatch
from weft.wire.messages import Count, Message, Text

# Takes what is noted of requests; None: the engine has ended.
Hear = Callable[[TraceBatch | None], None]


class ModelInfo(Message, tag="ready"):
    """Facts about the served model, for routes, the first lines and reports: what an engine sends once loaded."""

    name: Text
    architecture: Text
    dtype: Text
    vocab_size: Count
    max_length: Count
    memory_bytes: Count
    memory_tokens: Count  # the same in tokens of one long sequence
    max_sequences: Count
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class PromptFiles(Protocol):
    """What a backend on the same machine can do with prompts in files. `path` is one that the engine reaches."""

    async def submit(self, request: Request, save_to: str | None = None) -> OutputStream:
        """Submit a request, whose prompt is written to a new file; it ends when it is written."""
        ...

    async def load_prompt(self, path: str, salt: bytes, share: float) -> dict[str, Any]:
        """Load a prompt for requests with a salt; compute a share of it again, and refuse it on a difference.

        Returns the number of its tokens, of those that are cached now, and of those that were verified.
        """
        ...


class Backend(Protocol):
    """Interface of both backends. Call all methods from the event loop's thread.

    Request errors are `RequestError` (429: too many open requests), engine errors `EngineStopped`.
    """

    info: ModelInfo

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float) -> None:
        """Accept no more requests, let running ones finish for this long, then end the rest with an error."""

    @property
    def healthy(self) -> bool: ...

    async def submit(self, request: Request) -> OutputStream:
        """Submit a request; raises at once if it cannot be served."""
        ...

    def abort(self, stream: OutputStream) -> None:
        """Abort a request whose client has gone: its memory is free within a step. Ignores ended streams."""

    def finish(self, stream: OutputStream) -> None:
        """End a request at a stop string, as if the model had stopped. A last output and the report follow."""

    async def flush(self) -> int:
        """Drop everything that no running sequence uses; return how many cached tokens are left."""
        ...

    async def drop(self, tenant: bytes | None, prefix: bytes | None) -> dict[str, Any]:
        """Drop prefixes of a tenant, below a key, or all, from all tiers; return the tokens dropped and left."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Return a snapshot for metrics, by name: `Service.stats`, `Engine.stats` and `memory_stats` combined."""
        ...

    async def cache_report(self, limit: int) -> dict[str, Any]:
        """Return the largest shared prefixes with their resume points, bytes, age and hits."""
        ...

    def subscribe(self, hear: Callable[[EngineNews], None]) -> None:
        """Call `hear` with changes of the cache and the load, beginning with everything that is held.

        Calling it again starts over. The subscription survives restarts of the engine, which start over too.
        """

    def unsubscribe(self, hear: Callable[[EngineNews], None]) -> None:
        """Call `hear` no longer."""

    def watch(self, hear: Hear) -> None:
        """Call `hear` with what requests and steps do, beginning with everything that waits or runs.

        Calling it again begins anew, for everyone who watches; so does a restart of the engine.
        """

    def unwatch(self, hear: Hear) -> None:
        """Call `hear` no longer. Without anyone who watches, the engine notes nothing."""

    async def request_facts(self, name: str) -> list[dict[str, Any]]:
        """Return what is known of the sequences of a request that wait or run: the fields of `Runs`."""
        ...

    async def wait_failed(self) -> str:
        """Wait until the engine has ended for good on its own; return why."""
        ...
