"""What `weft serve` serves with several models: loads each into a process of its own when a request needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft import __version__
from weft.base.options import Options
from weft.fleet.local import visible_gpus
from weft.server.app import Background
from weft.server.front import Front, pool_for
from weft.server.models.app import create_models_app
from weft.server.models.catalogue import Catalogue
from weft.server.models.engines import ModelEngines
from weft.server.models.residency import Residency, ResidencyRules
from weft.server.texts.pool import TextPool
from weft.start.launch import Assembled, LaunchSettings, Parts, Prepared, load_texts
from weft.start.process_backend import ProcessBackend
from weft.start.shares import Shares, shares_of


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the command line. `settings` replace those of the server; `keep_alive_seconds` infinite: for ever."""

    name: str
    options: Options
    settings: Mapping[str, Any]


class ServedModel:
    """A loaded model: its engine, its text workers, and what answers its requests."""

    def __init__(self, backend: ProcessBackend, pool: TextPool, front: Front) -> None:
        self.backend = backend
        self.pool = pool
        self.front = front

    async def wait_failed(self) -> str:
        return await self.backend.wait_failed()

    async def close(self, drain_seconds: float) -> None:
        try:
            await self.backend.stop(drain_seconds)
        finally:
            self.pool.stop()


class ModelLoader:
    """`program` replaces the engine process."""

    def __init__(
        self,
        models: Sequence[NamedModel],
        shares: Shares,
        catalogue: Catalogue,
        place: LaunchSettings,
        program: Sequence[str] = (),
    ) -> None:
        self._models = {each.name: each for each in models}
        self._shares = shares
        self._catalogue = catalogue
        self._place = place
        self._program = program

    async def __call__(self, name: str) -> ServedModel:
        """Load a model; leave nothing behind if that fails."""
        options, place = self._shares.models[name].options, self._place
        backend = ProcessBackend(
            options,
            progress=False,
            # The next request loads it again.
            kill_silent=True,
            max_open=self._catalogue.limits.open_sequences,
            patience_seconds=place.engine_timeout or None,
            log_format=place.log_format,
            program=self._program,
        )
        await backend.start()
        try:
            return await self._with_texts(name, options, backend)
        except BaseException:
            await backend.stop(0)
            raise

    async def _with_texts(self, name: str, options: Options, backend: ProcessBackend) -> ServedModel:
        # In a thread: a tokenizer of a large vocabulary takes a second to load, and other streams go on.
        texts = await asyncio.to_thread(load_texts, options, backend.info.settings)
        own = {**self._models[name].settings, **self._catalogue.settings_of(name)}
        settings, entry = replace(self._catalogue.settings, **own), self._catalogue.entries[name]
        pool = pool_for(texts.tokenizer, texts.template, settings, self._place.log_format)
        found = (texts.tokenizer, texts.template, texts.end_tokens, settings, texts.suggested, pool)
        front = Front(backend, *found, self._catalogue.stored, entry.metrics)
        await pool.start()
        entry.loaded(front)
        return ServedModel(backend, pool, front)


@dataclass(frozen=True, slots=True)
class SeveralServed:
    """Several models. `rules` make those of the residency, given the budget."""

    models: Sequence[NamedModel]
    shares: Shares
    rules: Callable[[int], ResidencyRules]
    program: Sequence[str] = ()

    @classmethod
    def of(cls, models: Sequence[NamedModel], memory: str, keep_alive_seconds: float | None) -> SeveralServed:
        """Return the models with their shares of the memory. Raises if one cannot fit or does not exist."""
        shares = shares_of({each.name: each.options for each in models}, memory, lambda: bool(visible_gpus()))
        return cls(models, shares, lambda budget: ResidencyRules(budget=budget, keep_alive_seconds=keep_alive_seconds))

    def prepared(self, parts: Parts) -> Prepared:
        weights = {name: each.weights_bytes for name, each in self.shares.models.items()}
        catalogue = Catalogue(weights, parts.settings, parts.stored)
        loader = ModelLoader(self.models, self.shares, catalogue, parts.place, self.program)
        costs = {name: each.cost for name, each in self.shares.models.items()}
        clock = asyncio.get_running_loop().time
        engines = ModelEngines(Residency(costs, self.rules(self.shares.budget), clock), loader)

        def assembled() -> Assembled:
            background: list[Background] = []
            app = create_models_app(
                engines,
                catalogue,
                clock,
                keys=parts.keys,
                connections=parts.connections,
                batch_store=parts.batch_store,
                background=background,
            )
            return Assembled(app, background, self._lines, lambda address: f"models at {address}/v1/models")

        return Prepared(engines, assembled)

    def _lines(self, address: str) -> list[str]:
        kept = self.rules(self.shares.budget).keep_alive_seconds
        until = "until their memory is needed" if kept is None else f"for {kept:g} s after the last request"
        return [
            f"models   {', '.join(each.name for each in self.models)} (weft {__version__})",
            f"memory   {self.shares.about}",
            f"loading  at the first request; kept {until}",
            address,
        ]
