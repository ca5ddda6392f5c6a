"""Random traffic for the engine on the rolling-hash device: shared prefixes, branches, aborts, tight memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from tests.support.hashed.rolling import (
    VOCABULARY,
    RollingDevice,
    RoundingDevice,
    lone_vector,
    oracle,
    rolling_spec,
)
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.arena import choose_slab_bytes
from weft.memory.capacity import slabs_alone
from weft.memory.kinds import unit_bytes
from weft.memory.spec import MemorySpec


@dataclass(frozen=True)
class Arrival:
    prompt: list[int]
    count: int
    step: int
    abort_after: int | None
    salt: bytes
    priority: int
    snapshots: tuple[int, ...]
    stop: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] | None = None
    seed: int | None = None  # None: greedy
    vector_from: int | None = None  # None: it asks for an answer

    def answer(self, spec: MemorySpec, exact: bool = False) -> list[int]:
        return oracle(spec, self.prompt, self.count, self.stop, self.bad_words, self.allowed, exact, self.seed)


@dataclass(frozen=True)
class Workload:
    spec: MemorySpec
    arrivals: list[Arrival]
    config: EngineConfig
    lazy: bool = False


@dataclass
class Run:
    engine: Engine
    device: RollingDevice
    answers: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    vectors: dict[int, np.ndarray | None] = field(default_factory=dict)


def make_arrivals(
    random: Random, spec: MemorySpec, count: int, longest: int, late: int = 6, exact: bool = False
) -> list[Arrival]:
    """Prompts that share beginnings with earlier ones, and sometimes with their answers (a second turn)."""
    stems: list[list[int]] = []
    arrivals = []
    for _ in range(count):
        stem: list[int] = []
        if stems and random.random() < 0.75:
            earlier = random.choice(stems)
            stem = earlier[: random.choice([len(earlier), random.randint(0, len(earlier))])]
        fresh = [random.randrange(VOCABULARY) for _ in range(random.randint(0, max(0, longest - len(stem))))]
        prompt = (stem + fresh)[:longest] or [random.randrange(VOCABULARY)]
        stop = frozenset(random.sample(range(VOCABULARY), 3)) if random.random() < 0.3 else frozenset()
        wanted = random.randint(0 if random.random() < 0.1 else 1, 2 * spec.cell + 3)
        stems.append(prompt + oracle(spec, prompt, random.randint(0, wanted), stop, exact=exact))
        arrivals.append(
            Arrival(
                prompt,
                wanted,
                random.randint(0, late),
                random.randint(0, 12) if random.random() < 0.2 else None,
                b"tenant" if random.random() < 0.15 else b"",
                random.choice([0, 0, 0, 1]),
                tuple(random.sample(range(len(prompt)), min(len(prompt), 2))) if random.random() < 0.2 else (),
                stop,
            )
        )
    return arrivals


def restrict(random: Random, spec: MemorySpec, arrival: Arrival, exact: bool) -> Arrival:
    """The same request, which must not use some of the words that it would answer with, or only some tokens."""
    if random.random() < 0.5:
        return arrival
    if random.random() < 0.3:
        arrival = replace(arrival, allowed=tuple(random.sample(range(VOCABULARY), random.choice([1, 5, 40]))))
    words: list[tuple[int, ...]] = []
    first = 0
    while arrival.count and first < arrival.count and len(words) < 6:
        # Words of the answer with the earlier words banned, from its start on: each of them is met.
        word = tuple(replace(arrival, bad_words=tuple(words)).answer(spec, exact)[first : first + random.randint(1, 4)])
        words += [word] if word else []
        first += random.randint(1, 3)
    if arrival.count and random.random() < 0.5:
        # A word that continues the prompt: only generated tokens count.
        words.append((arrival.prompt[-1], arrival.answer(spec, exact)[0]))
    return replace(arrival, bad_words=tuple(words))


def tight_memory(spec: MemorySpec, arrivals: list[Arrival], slack: float) -> int:
    """Bytes in which the longest sequence alone just fits, times `slack`."""
    longest = max(len(a.prompt) + a.count for a in arrivals)
    size = sum(unit_bytes(spec).values())
    while not _fits(spec, size, longest):
        size = size * 9 // 8 + 64
    return int(size * slack)


def _fits(spec: MemorySpec, memory_bytes: int, length: int) -> bool:
    slab_bytes = choose_slab_bytes(unit_bytes(spec), memory_bytes)
    return slabs_alone(spec, unit_bytes(spec), slab_bytes, length) <= memory_bytes // slab_bytes


def random_workload(seed: int, count: int = 8, **overrides: object) -> Workload:
    random = Random(seed)
    kinds = random.choice(
        [
            {"full": True, "recurrent": True},
            {"full": True, "recurrent": True, "heavy": True},
            {"full": True, "recurrent": False},
            {"full": True, "recurrent": False, "window": random.choice([2, 3, 4, 5, 9, 30])},
            {"full": False, "recurrent": False, "window": random.choice([2, 6, 8])},
            {"full": True, "recurrent": True, "window": random.choice([3, 7, 8])},
            {"full": False, "recurrent": True},
        ]
    )
    spec = rolling_spec(**kinds, cell=4)
    exact = bool(overrides.get("exact", False))
    arrivals = make_arrivals(random, spec, count, random.choice([6, 14, 30]), exact=exact)
    # Another random stream, so that the rest of a workload does not depend on it.
    dice = Random(f"words {seed}")
    arrivals = [restrict(dice, spec, arrival, exact) for arrival in arrivals]
    longest = max(len(a.prompt) + a.count for a in arrivals)
    seats = random.choice([1, 2, 4, 8])
    config = EngineConfig(
        memory_bytes=tight_memory(spec, arrivals, random.choice([1.0, 1.0, 1.3, 2.0, 6.0])),
        max_sequences=seats,
        max_tokens_per_step=max(seats, random.choice([1, 3, 5, 8, 17, 64])),
        max_length=longest,
        depth=random.randint(0, 1),
        cache=random.random() < 0.85,
        order=random.choice(["fcfs", "prefix"]),
        eviction=random.choice(["value", "lru", "flops"]),
        capture_every=random.choice([0, 0, 4, 8, 16]),
        paranoid=True,
        seed=seed,
    )
    return Workload(spec, arrivals, replace(config, **overrides), lazy=random.random() < 0.5)


def with_vectors(workload: Workload, seed: int) -> Workload:
    """The same traffic, in which half of the requests ask for a vector: of the last token, or a mean."""
    random, arrivals = Random(f"vectors {seed}"), []
    for each in workload.arrivals:
        if random.random() < 0.5:
            first = random.choice([len(each.prompt) - 1, 0, random.randrange(len(each.prompt))])
            each = replace(each, count=0, bad_words=(), allowed=None, vector_from=first)
        arrivals.append(each)
    return replace(workload, arrivals=arrivals)


def run_workload(
    workload: Workload, engine_class: type[Engine] = Engine, device_class: type[RollingDevice] = RollingDevice
) -> Run:
    config = workload.config
    kind = RoundingDevice if config.exact else device_class
    device = kind(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
    run = Run(engine_class(workload.spec, device, config), device)
    drive(workload, run)
    return run


def drive(workload: Workload, run: Run, max_steps: int = 5000) -> None:
    """Drive the engine until it is idle, aborting on the way."""
    waiting = sorted(range(len(workload.arrivals)), key=lambda i: workload.arrivals[i].step)
    index_of: dict[int, int] = {}
    steps = 0
    while waiting or not run.engine.idle:
        while waiting and workload.arrivals[waiting[0]].step <= steps:
            index = waiting.pop(0)
            index_of[run.engine.add(request_of(workload.arrivals[index]))] = index
            run.answers[index] = []
        for number, index in index_of.items():
            after = workload.arrivals[index].abort_after
            if after is not None and steps == workload.arrivals[index].step + after:
                run.engine.abort(number)
        for output in run.engine.step():
            index = index_of[output.sequence]
            assert index not in run.finished, "an output after the end"
            if output.token is not None:
                run.answers[index].append(output.token)
            if output.finish is not None:
                run.finished[index] = output.finish
                if workload.arrivals[index].vector_from is not None:
                    run.vectors[index] = run.engine.report(output.sequence).vector.mean
        steps += 1
        assert steps < max_steps, "the engine does not come to an end"


def request_of(arrival: Arrival) -> Request:
    return Request(
        prompt=np.array(arrival.prompt, np.int32),
        params=SamplingParams(
            max_tokens=arrival.count,
            temperature=0.0 if arrival.seed is None else 1.0,
            seed=arrival.seed,
            bad_words=arrival.bad_words,
            allowed_token_ids=arrival.allowed,
            vector_from=arrival.vector_from,
        ),
        stop_tokens=arrival.stop,
        salt=arrival.salt,
        priority=arrival.priority,
        snapshots=arrival.snapshots,
    )


def check_answers(workload: Workload, run: Run) -> None:
    """Every answer equals the oracle's; an aborted one is a beginning of it. Nothing stays leased."""
    for index, arrival in enumerate(workload.arrivals):
        expected = arrival.answer(workload.spec, workload.config.exact)
        answer, finish = run.answers[index], run.finished[index]
        if finish is FinishReason.ABORT:
            assert answer == expected[: len(answer)], f"request {index} went astray before it was aborted"
            continue
        assert finish is not FinishReason.ERROR
        assert answer == expected, f"request {index} answered {answer}, not {expected}"
        if arrival.vector_from is not None:
            lone = lone_vector(workload.spec, arrival.prompt, arrival.vector_from, workload.config.exact)
            assert np.array_equal(run.vectors[index], lone), f"request {index} has the vector of another run"
        stopped = bool(answer) and answer[-1] in arrival.stop
        assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert not run.engine.ledger.leases
    run.engine.ledger.cache.clear()
    assert run.engine.ledger.arena.used_slabs == 0, "something is still owned after everything was forgotten"


def run_and_check(workload: Workload, engine_class: type[Engine] = Engine) -> Run:
    run = run_workload(workload, engine_class)
    check_answers(workload, run)
    return run
