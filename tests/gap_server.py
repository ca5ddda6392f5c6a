"""A server in a process of its own, with an engine that needs no model and takes long prompts: for what stops streams.

Run as a program it prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.instant import PROGRAM as ENGINE
from tests import tiny_model
from weft.base.options import Options
from weft.server.app import create_app
from weft.server.http import bounded_protocol
from weft.server.process_backend import ProcessBackend
from weft.server.settings import ServerSettings
from weft.text.template import ChatTemplate

PROGRAM = (sys.executable, str(Path(__file__).resolve()))
STEP_SECONDS = 0.005


async def main() -> None:
    backend = ProcessBackend(Options(model=str(STEP_SECONDS)), progress=False, program=ENGINE)
    await backend.start()
    settings, tokenizer = ServerSettings(), tiny_model.tokenizer()
    app = create_app(backend, tokenizer, ChatTemplate(tiny_model.TEMPLATE), frozenset(), settings)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=bounded_protocol(settings.limits), lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = server.force_exit = True
    await serving
    await backend.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
