"""The work that every engine does, and how it is timed. Imports no engine.

Single: one request at a time; the rate counts the tokens after the first. Crowd: concurrent requests with a shared
prefix that the engine has not seen before; the rate is the tokens of all answers over the whole time.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.peers.checkpoints import VOCAB

WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to measure. Lengths are in tokens."""

    single_prompt: int = 128
    single_answer: int = 96
    single_repeats: int = 2
    requests: int = 16
    shared: int = 1000
    own: int = 30  # on average; lengths vary by up to a quarter
    answer: int = 64
    crowd_repeats: int = 2
    crowd_seconds: float = 12.0  # no repetition starts after this

    @property
    def longest(self) -> int:
        return max(self.single_prompt + self.single_answer, self.shared + 2 * self.own + self.answer)


@dataclass(frozen=True, slots=True)
class Job:
    """One engine, one model, one precision."""

    engine: str
    checkpoint: str
    gguf: str | None
    precision: str
    threads: int
    work: Work

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        return cls(**{**values, "work": Work(**values["work"])})


@dataclass(slots=True)
class Measured:
    """Tokens per second of every repetition, and the answers of the first one."""

    single: list[float] = field(default_factory=list)
    crowd: list[float] = field(default_factory=list)
    single_tokens: list[int] = field(default_factory=list)
    crowd_tokens: list[list[int]] = field(default_factory=list)
    version: str = ""
    settings: str = ""


class Engine(Protocol):
    """Interface of a driver. Answers are greedy and have a fixed length."""

    version: str
    settings: str

    def single(self, prompt: list[int], answer: int) -> tuple[list[int], float]:
        """Return the answer, and the seconds from its first token to its last."""

    def crowd(self, prompts: list[list[int]], answer: int) -> list[list[int]]:
        """Return all answers, in the order of the prompts."""


def random_tokens(seed: str, count: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCAB) for _ in range(count)]


def crowd_prompts(work: Work, repeat: str) -> list[list[int]]:
    shared = random_tokens(f"shared {repeat}", work.shared)
    spread = max(1, work.own // 4)
    lengths = [work.own - spread + (index * 5) % (2 * spread + 1) for index in range(work.requests)]
    return [shared + random_tokens(f"own {repeat} {index}", length) for index, length in enumerate(lengths)]


def measure(engine: Engine, work: Work) -> Measured:
    found = Measured(version=engine.version, settings=engine.settings)
    engine.single(random_tokens("warm", work.single_prompt), WARM_TOKENS)
    for repeat in range(work.single_repeats):
        tokens, seconds = engine.single(random_tokens(f"single {repeat}", work.single_prompt), work.single_answer)
        assert len(tokens) == work.single_answer, f"got {len(tokens)} tokens instead of {work.single_answer}"
        found.single.append((work.single_answer - 1) / seconds)
        found.single_tokens = found.single_tokens or tokens
    if work.crowd_repeats:
        _measure_crowd(engine, work, found)
    return found


def _measure_crowd(engine: Engine, work: Work, found: Measured) -> None:
    small = Work(requests=work.requests, shared=100, own=work.own)
    engine.crowd(crowd_prompts(small, "warm"), 4)
    begun = time.perf_counter()
    for repeat in range(work.crowd_repeats):
        if repeat and time.perf_counter() - begun > work.crowd_seconds:
            break
        prompts = crowd_prompts(work, str(repeat))
        start = time.perf_counter()
        answers = engine.crowd(prompts, work.answer)
        seconds = time.perf_counter() - start
        assert all(len(answer) == work.answer for answer in answers), [len(answer) for answer in answers]
        found.crowd.append(work.requests * work.answer / seconds)
        found.crowd_tokens = found.crowd_tokens or answers


def drive(open_engine: Callable[[Job], Engine]) -> None:
    """Run a driver: read the job file, measure, write the result file."""
    job, target = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    target.write_text(json.dumps(asdict(measure(open_engine(job), job.work))))


def middle(rates: list[float]) -> float | None:
    return median(rates) if rates else None


def shared_start(first: list[int], second: list[int]) -> int:
    """Return the number of leading tokens that are equal.

    >>> shared_start([1, 2, 3], [1, 2, 4])
    2
    """
    pairs: list[Any] = list(zip(first, second))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
