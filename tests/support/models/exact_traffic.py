"""Random traffic for engines in exact mode, and the digests of lone, cold, unchunked runs to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple, Protocol

import torch

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.engine.sameness import admit_everything
from tests.support.models.engines import TINY, Answer, Ask, dummy_model, seeded, serve, smallest_memory, tokens
from weft.base.config import EngineConfig
from weft.base.options import PAGE_BYTES
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.kernels.choosing import Chosen, choose
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.runner import Runner
from weft.start.assembling import numerics_of

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
def exact_model(
    family: str, dtype: torch.dtype, pages: str = "auto", states: str = "float32", activations: str = "wide"
) -> ExactModel:
    """A model that keeps keys and values in the dtype `pages`, and its states in `states`."""
    bare = dummy_model(TINY[family], dtype)
    bare.keep(pages, states)
    chosen = choose("cpu", dtype, bare.memories, exact=True, activations=activations)
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
    runner = Runner(
        found.model,
        found.spec,
        memory_bytes,
        config.max_sequences,
        threads=threads,
        operations=found.chosen.operations,
        numerics=numerics_of(found.chosen),
    )
    return Engine(found.spec, runner, config, drafting=drafting)


def digesting(count: int, seed: int) -> SamplingParams:
    return replace(seeded(count, seed), logits_digest=True)


def alone(found: ExactSource, ask: Ask, **settings: Any) -> Answer:
    """The answer of an engine that has seen nothing else, in whole steps."""
    engine = found.engine(cache=False, max_sequences=1, max_tokens_per_step=4096, **settings)
    return serve(engine, [replace(ask, step=0, abort_after=None)])[0]


class Served(NamedTuple):
    """Counts of what was served.

    `tokens` are those of prompts and answers, `digests` those of answers, which were compared. `cached` tokens of
    prompts were not computed again; `preemptions` of running requests.
    """

    tokens: int = 0
    digests: int = 0
    cached: int = 0
    preemptions: int = 0

    def more(self, other: Served) -> Served:
        return Served(*map(sum, zip(self, other, strict=True)))


def conversations(
    random: Random, found: ExactSource, count: int, longest: int = 400, **settings: Any
) -> list[tuple[Ask, Answer]]:
    """Requests that share beginnings with those before and continue their answers, each with that of a lone run."""
    asks: list[tuple[Ask, Answer]] = []
    known: list[list[int]] = []
    for number in range(count):
        stem: list[int] = []
        if known and random.random() < 0.8:
            earlier = random.choice(known[-8:])
            stem = earlier[: random.choice([len(earlier), len(earlier), random.randint(0, len(earlier))])]
        fresh = tokens(random.choice([1, 1, 5, 63, 64, 65, 130]), random.randrange(1 << 30))
        prompt = (stem + fresh)[:longest]
        ask = Ask(prompt, digesting(random.choice([1, 1, 3, 3, 20, 100]), number))
        answer = alone(found, ask, **settings)
        asks.append((ask, answer))
        known.append(prompt + answer.tokens if random.random() < 0.6 else prompt)
    return asks


def check_traffic(
    family: str, dtype: torch.dtype, seed: int, count: int, threads: int = 1, engines: int = 1, most: int = 8
) -> Served:
    """Serve random traffic on a CPU; with drafts if the seed is odd."""
    found = exact_model(family, dtype)
    return compare_traffic(found, family, seed, count, seed % 2 == 1, engines, (2, most), threads=threads)


def check_long_traffic(family: str, dtype: torch.dtype, seed: int, threads: int = 1) -> Served:
    """Serve about 100,000 tokens.

    A step of 32 rows takes little longer than one of 2, so most engines are wide and have some memory, and the
    others serve few of the requests. With fewer engines most of the time would go to lone runs.
    """
    return check_traffic(family, dtype, seed, count=64, threads=threads, engines=12, most=32)


def check_reuse(found: ExactSource, family: str, drafts: bool = True) -> None:
    """Answer requests by cache hits, with drafts, and with too little memory; every digest is that of a lone run."""
    first, other = (Ask(tokens(size, size), digesting(10, size)) for size in (122, 60))
    first_answer, other_answer = alone(found, first), alone(found, other)
    turn = Ask(first.prompt + first_answer.tokens + tokens(5, 7), digesting(10, 7))
    asks, expected = [first, other, turn], [first_answer, other_answer, alone(found, turn)]
    ample = found.engine(drafting=drafts_of(asks, expected, seed=1) if drafts else None)
    answers = serve(ample, [other]) + serve(ample, [first]) + serve(ample, [turn])
    for ask, answer, wanted in zip((other, first, turn), answers, (expected[1], expected[0], expected[2]), strict=True):
        check_answer(ask, answer, wanted)
    reports = [answer.report for answer in answers if answer.report is not None]
    assert reports[-1].cached_tokens >= 64, "nothing was hit"
    accepted = sum(report.drafts.accepted for report in reports)
    assert not drafts or 0 < accepted < sum(report.drafts.proposed for report in reports), "no draft was verified"
    # Of different tenants, so that they share nothing.
    together = [replace(ask, salt=bytes([place])) for place in range(2) for ask in asks]
    least = smallest_memory(family, 160, 8, found.spec)
    # A second request must fit when it starts, and not later on. States leave room for it with a little more.
    for quarters in (4, 5, 6):
        tight = found.engine(least * quarters // 4 // PAGE_BYTES * PAGE_BYTES, max_length=160)
        admit_everything(tight)
        for ask, answer, wanted in zip(together, serve(tight, together), expected * 2, strict=True):
            check_answer(ask, answer, wanted)
        if tight.planner.preemptions:
            return
    raise AssertionError("nothing was preempted")


def compare_traffic(
    found: ExactSource,
    family: str,
    seed: int,
    count: int,
    drafts: bool,
    engines: int = 1,
    widths: tuple[int, int] = (2, 8),
    **settings: Any,
) -> Served:
    """Serve random traffic in some random engines; every digest equals that of a lone, cold run."""
    random = Random(f"{family} {seed}")
    pairs = conversations(random, found, count, **settings)
    longest = max(len(ask.prompt) + ask.params.max_tokens for ask, _ in pairs)
    served = Served()
    for number in range(engines):
        narrow = random.random() < 0.4
        width = random.choice(widths) if narrow else max(widths)
        tight = smallest_memory(family, longest, width, found.spec)
        least, most = (1, 3) if narrow else (3, 10)
        memory = random.choice([max(ROOM, 4 * tight), int(random.uniform(least, most) * tight), least * tight])
        few = max(6, len(pairs) // 4)
        first = random.randrange(max(1, len(pairs) - few)) if narrow else 0
        chosen = pairs[first : first + few] if narrow else pairs
        if drafts:
            settings["drafting"] = drafts_of(*zip(*chosen, strict=True), seed + number)
        engine = random_engine(random, found, memory_bytes=memory, max_sequences=width, **settings)
        if memory < ROOM and random.random() < 0.5:
            admit_everything(engine)
        # Engines after the first see the requests arrive in other steps, and some of them end before their time.
        arriving = arrivals(random, [ask for ask, _ in chosen], aborts=number > 0)
        answers = serve(engine, arriving)
        for ask, answer, (_, expected) in zip(arriving, answers, chosen, strict=True):
            check_answer(ask, answer, expected)
        served = served.more(count_served(engine, arriving, answers))
    return served


def random_engine(random: Random, found: ExactSource, **settings: Any) -> Engine:
    return found.engine(
        max_tokens_per_step=random.choice([settings["max_sequences"], 100, 512]),
        depth=random.randint(0, 1),
        eviction=random.choice(["value", "lru"]),
        # Less time than any step takes: one cell of a prompt beside decodes, whatever the clock says.
        max_step_ms=random.choice([0.0, 0.001]),
        **settings,
    )


def arrivals(random: Random, asks: Sequence[Ask], aborts: bool) -> list[Ask]:
    """Requests in any order within a few steps, or one after another; a few of them end before their time."""
    steps_each = random.choice([0.0, 0.5, 1.5])
    return [
        replace(
            ask,
            step=int(steps_each * number) + random.randint(0, 30 if not steps_each else 4),
            abort_after=random.randint(1, 60) if aborts and random.random() < 0.1 else None,
        )
        for number, ask in enumerate(asks)
    ]


def check_answer(ask: Ask, answer: Answer, expected: Answer) -> None:
    """Raise if an answer is not that of the lone run, up to where it was aborted."""
    length = len(answer.digests) if answer.finish is FinishReason.ABORT else None
    assert answer.digests == expected.digests[:length], first_difference(ask, answer, expected)
    assert answer.tokens == expected.tokens[:length]
    assert answer.logprobs == expected.logprobs[:length]
    assert answer.finish is expected.finish or ask.abort_after is not None


def count_served(engine: Engine, asks: Sequence[Ask], answers: Sequence[Answer]) -> Served:
    """Count the requests of which a token was computed."""
    begun = [(ask, answer) for ask, answer in zip(asks, answers, strict=True) if answer.digests]
    digests = sum(len(answer.digests) for _, answer in begun)
    cached = sum(answer.report.cached_tokens for _, answer in begun if answer.report is not None)
    return Served(digests + sum(len(ask.prompt) for ask, _ in begun), digests, cached, engine.planner.preemptions)


def drafts_of(asks: Sequence[Ask], answers: Sequence[Answer], seed: int) -> ScriptedDrafting:
    """Drafts of the answers, some of them wrong."""
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    return ScriptedDrafting(known, DRAFTS, seed)


def first_difference(ask: Ask, answer: Answer, expected: Answer) -> str:
    pairs = enumerate(zip(answer.digests, expected.digests, strict=False))
    place = next((index for index, (one, other) in pairs if one != other), "its length")
    return f"a prompt of {len(ask.prompt)} tokens, {answer.report}: differs at {place}"
