"""A server in a process of its own, with an engine that needs no model and takes long prompts: for what stops streams.

Run as a program it prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.instant import PROGRAM as ENGINE
from tests.support.models import tiny_model
from weft.base.options import Options
from weft.server.app import create_app
from weft.server.http.listener import bind
from weft.server.settings import ServerSettings
from weft.start.launch import Server
from weft.start.process_backend import ProcessBackend
from weft.text.template import ChatTemplate

PROGRAM = (sys.executable, str(Path(__file__).resolve()))
STEP_SECONDS = 0.005


async def main() -> None:
    backend = ProcessBackend(Options(model=str(STEP_SECONDS)), progress=False, program=ENGINE)
    await backend.start()
    settings, tokenizer = ServerSettings(), tiny_model.tokenizer()
    app = create_app(backend, tokenizer, ChatTemplate(tiny_model.TEMPLATE), frozenset(), settings)

    async def drain() -> None:
        await backend.stop(0)

    with bind("127.0.0.1", 0) as listener:
        server = Server(app, settings, drain, lambda _: print(listener.getsockname()[1], flush=True))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(main())
