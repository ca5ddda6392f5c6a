"""Random traffic for engines in exact mode, and the digests of lone, cold, unchunked runs to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple, Protocol

import torch

from tests.engines import TINY, Answer, Ask, dummy_model, seeded, serve, smallest_memory, tokens
from tests.test_drafts import ScriptedDrafting
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.kernels.choosing import Chosen, choose
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.exact import ExactRunner
from weft.speculate.drafting import Drafting

ROOM = 64 << 20
DRAFTS = 5


@dataclass(frozen=True)
class ExactModel:
    model: CausalModel
    spec: MemorySpec
    chosen: Chosen

    def engine(self, memory_bytes: int = ROOM, **settings: Any) -> Engine:
        return exact_engine(self, memory_bytes, **settings)


class ExactSource(Protocol):
    """A model in exact mode, on any device."""

    spec: MemorySpec

    def engine(self, memory_bytes: int = ROOM, **settings: Any) -> Engine:
        """An engine that remembers nothing."""


@cache
def exact_model(family: str, dtype: torch.dtype) -> ExactModel:
    bare = dummy_model(TINY[family], dtype)
    chosen = choose("cpu", dtype, bare.memories, exact=True)
    spec = MemorySpec(bare.memories(chosen.operations), draft_room=DRAFTS)
    return ExactModel(dummy_model(TINY[family], dtype, chosen.operations), spec, chosen)


def exact_engine(
    found: ExactModel,
    memory_bytes: int = ROOM,
    threads: int = 1,
    drafting: Drafting | None = None,
    **settings: object,
) -> Engine:
    options = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory_bytes, exact=True, **options)
    runner = ExactRunner(
        found.model, found.spec, memory_bytes, config.max_sequences, threads=threads, operations=found.chosen.operations
    )
    return Engine(found.spec, runner, config, drafting=drafting)


def digesting(count: int, seed: int) -> SamplingParams:
    return replace(seeded(count, seed), logits_digest=True)


def alone(found: ExactSource, ask: Ask, **settings: Any) -> Answer:
    """The answer of an engine that has seen nothing else, in whole steps."""
    engine = found.engine(cache=False, max_sequences=1, max_tokens_per_step=4096, **settings)
    return serve(engine, [replace(ask, step=0, abort_after=None)])[0]


class Served(NamedTuple):
    """Tokens of prompts and answers that were served, and those of answers, whose digests were compared."""

    tokens: int = 0
    digests: int = 0

    def more(self, other: Served) -> Served:
        return Served(self.tokens + other.tokens, self.digests + other.digests)


def conversations(
    random: Random, found: ExactSource, count: int, longest: int = 300, **settings: Any
) -> list[tuple[Ask, Answer]]:
    """Requests that share beginnings with earlier ones and continue their answers, each with that of a lone run."""
    asks: list[tuple[Ask, Answer]] = []
    known: list[list[int]] = []
    for number in range(count):
        stem: list[int] = []
        if known and random.random() < 0.7:
            earlier = random.choice(known)
            stem = earlier[: random.choice([len(earlier), random.randint(0, len(earlier))])]
        fresh = tokens(random.choice([1, 1, 5, 63, 64, 65, 130]), random.randrange(1 << 30))
        prompt = (stem + fresh)[:longest]
        ask = Ask(prompt, digesting(random.choice([1, 3, 70]), number), step=random.randint(0, 30))
        answer = alone(found, ask, **settings)
        asks.append((ask, answer))
        known.append(prompt + answer.tokens if random.random() < 0.6 else prompt)
    return asks


def check_traffic(family: str, dtype: torch.dtype, seed: int, count: int, threads: int = 1, engines: int = 1) -> Served:
    """Serve random traffic on a CPU; with drafts if the seed is odd."""
    found = exact_model(family, dtype)
    return compare_traffic(found, family, seed, count, seed % 2 == 1, engines, threads=threads)


def check_long_traffic(family: str, dtype: torch.dtype, seed: int, threads: int = 1) -> Served:
    """Serve about 20,000 tokens. Of few requests or engines, most of the time would go to lone runs."""
    return check_traffic(family, dtype, seed, count=24, threads=threads, engines=8)


def compare_traffic(
    found: ExactSource, family: str, seed: int, count: int, drafts: bool, engines: int = 1, **settings: Any
) -> Served:
    """Serve random traffic in some random engines; every digest equals that of a lone, cold run."""
    random = Random(f"{family} {seed}")
    asks, answers = zip(*conversations(random, found, count, **settings), strict=True)
    longest = max(len(ask.prompt) + ask.params.max_tokens for ask in asks)
    tight = smallest_memory(family, longest, spec=found.spec)
    for number in range(engines):
        if drafts:
            settings["drafting"] = drafts_of(asks, answers, seed + number)
        # Those after the first see the requests arrive in other steps.
        arriving = [replace(ask, step=random.randint(0, 30)) for ask in asks] if number else asks
        for ask, answer, expected in zip(
            asks, serve(random_engine(random, found, tight, **settings), arriving), answers
        ):
            assert answer.digests == expected.digests, first_difference(ask, answer, expected)
            assert answer.tokens == expected.tokens
    answered = sum(ask.params.max_tokens for ask in asks)
    return Served(engines * (answered + sum(len(ask.prompt) for ask in asks)), engines * answered)


def random_engine(random: Random, found: ExactSource, tight: int, **settings: Any) -> Engine:
    return found.engine(
        memory_bytes=random.choice([max(ROOM, 4 * tight), 2 * tight, tight]),
        max_sequences=random.choice([2, 8]),
        max_tokens_per_step=random.choice([8, 100, 512]),
        depth=random.randint(0, 1),
        eviction=random.choice(["value", "lru"]),
        # Less time than any step takes: one cell of a prompt beside decodes, whatever the clock says.
        max_step_ms=random.choice([0.0, 0.001]),
        **settings,
    )


def drafts_of(asks: Sequence[Ask], answers: Sequence[Answer], seed: int) -> ScriptedDrafting:
    """Drafts of the answers, some of them wrong."""
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    return ScriptedDrafting(known, DRAFTS, seed)


def first_difference(ask: Ask, answer: Answer, expected: Answer) -> str:
    pairs = enumerate(zip(answer.digests, expected.digests, strict=False))
    place = next((index for index, (one, other) in pairs if one != other), "its length")
    return f"a prompt of {len(ask.prompt)} tokens, {answer.report}: differs at {place}"
