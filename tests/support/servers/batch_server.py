"""A server with batches and an engine without a model: `python -m tests.support.servers.batch_server FOLDER SECONDS`.

It writes its port to standard output, and takes SECONDS for each step, so that a test can end it in the middle.
"""

from __future__ import annotations

import asyncio
import sys
import time

from msgspec import structs

from tests.support.servers.asgi import END_TOKENS
from tests.support.servers.fake_engines import InstantEngine, fake_info
from weft.server.app import Background, create_app
from weft.server.batches.store import BatchStore
from weft.server.http.connections import bounded_connections
from weft.server.http.listener import bind
from weft.server.settings import ServerSettings
from weft.start.launch import Server
from weft.start.thread_backend import ThreadBackend


async def main(folder: str, step_seconds: float) -> None:
    settings = ServerSettings(log_requests=False)
    backend = ThreadBackend(lambda: (InstantEngine(step_seconds), structs.replace(fake_info(), max_sequences=8)))
    await backend.start()
    connections = bounded_connections(settings.limits)
    background: list[Background] = []
    store = BatchStore(folder, settings.limits, time.time)
    app = create_app(
        backend, None, None, END_TOKENS, settings, connections=connections, batch_store=store, background=background
    )
    listener = bind("127.0.0.1", 0)

    async def drain() -> None:
        await backend.stop(0)

    def ready(_: object) -> None:
        print(listener.getsockname()[1], flush=True)

    async with background[0]():
        await Server(app, settings, drain, ready, connections=connections).serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
