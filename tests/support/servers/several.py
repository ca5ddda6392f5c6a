"""A server with several models without a socket, whose engines load, fail and end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.support.servers.asgi import END_TOKENS, Exchange, PacedEngine
from tests.support.servers.fake_engines import InstantEngine, fake_info
from weft.base.errors import ModelError
from weft.server.access.auth import Keys
from weft.server.front import Front
from weft.server.models.app import create_models_app
from weft.server.models.catalogue import Catalogue
from weft.server.models.engines import ModelEngines
from weft.server.models.residency import Residency, ResidencyRules
from weft.server.settings import ServerSettings
from weft.server.stored.answers import StoredAnswers
from weft.start.thread_backend import ThreadBackend

COST = 10


class FakeModel:
    """A model over an engine without weights, in a thread of this process."""

    def __init__(self, front: Front, engine: InstantEngine) -> None:
        self.front = front
        self.engine = engine
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> str:
        return await self.ended

    async def close(self, drain_seconds: float) -> None:
        if isinstance(self.engine, PacedEngine):
            self.engine.free()
        await self.front.backend.stop(drain_seconds)


class Several:
    """The application and its world. A model loads at once unless it is held, and fails if it is in `broken`."""

    def __init__(
        self, names: tuple[str, ...], settings: ServerSettings, rules: ResidencyRules, stored: StoredAnswers | None
    ):
        self.now = 1000.0
        self.catalogue = Catalogue(dict.fromkeys(names, 7), settings, stored)
        self.residency = Residency(dict.fromkeys(names, COST), rules, lambda: self.now)
        # Nothing happens later by itself: `pass_time` looks again.
        never = SimpleNamespace(cancel=lambda: None)
        self.engines = ModelEngines(self.residency, self._load, lambda at, call: never)
        self.keys = Keys(settings)
        self.background: list[Any] = []
        self.app: Any = None
        self.paced: set[str] = set()
        self.broken: dict[str, str] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.models: dict[str, FakeModel] = {}

    async def _load(self, name: str) -> FakeModel:
        if name in self.held:
            await self.held[name].wait()
        if name in self.broken:
            raise ModelError(self.broken[name])
        engine = PacedEngine() if name in self.paced else InstantEngine()
        info = fake_info(exact=False, draft="off", cache=True, max_tokens_per_step=64)
        backend = ThreadBackend(lambda: (engine, info))
        await backend.start()
        entry, settings = self.catalogue.entries[name], self.catalogue.settings
        own = replace(settings, **self.catalogue.settings_of(name))
        front = Front(backend, None, None, END_TOKENS, own, None, None, self.catalogue.stored, entry.metrics)
        entry.loaded(front)
        self.models[name] = FakeModel(front, engine)
        return self.models[name]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.engines.advance()

    def state(self, name: str) -> str:
        return self.residency.models[name].state

    async def call(self, path: str, body: Any = None, **more: Any) -> Exchange:
        return await Exchange(self.app, path, body, **more).answer()

    def begin(self, path: str, body: Any = None, **more: Any) -> tuple[Exchange, asyncio.Task[Exchange]]:
        exchange = Exchange(self.app, path, body, **more)
        return exchange, exchange.start()


@asynccontextmanager
async def several(
    *names: str,
    settings: ServerSettings | None = None,
    stored: StoredAnswers | None = None,
    batch_store: Any = None,
    **rules: Any,
) -> AsyncIterator[Several]:
    """A server of these models; by default one fits at a time, and stays for ten seconds."""
    given = ResidencyRules(**{"budget": COST, **rules})
    world = Several(names or ("a", "b"), settings or ServerSettings(), given, stored)
    world.app = create_models_app(
        world.engines,
        world.catalogue,
        lambda: world.now,
        keys=world.keys,
        batch_store=batch_store,
        background=world.background,
    )
    try:
        yield world
    finally:
        await world.engines.stop(0)
