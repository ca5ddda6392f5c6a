"""Whole engines on tiny models of every family, and requests driven through them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tests.support.kernels.operations import CPU
from tests.support.models.hybrid_models import HYBRIDS, ODD_HYBRIDS
from tests.support.models.oracle import Tiny, config_of
from tests.support.models.plain_models import ODD_PLAIN, PLAIN
from weft.base.config import EngineConfig
from weft.base.errors import OptionError
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.engine.events import FinishReason, Report
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.kernels.interface import Operations
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.models.weights import load_model
from weft.runner.runner import Runner

FAMILIES: dict[str, Tiny] = {**HYBRIDS, **PLAIN}
TINY: dict[str, Tiny] = {**FAMILIES, **ODD_HYBRIDS, **ODD_PLAIN}
VOCABULARY = 256


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32, operations: Operations | None = None) -> CausalModel:
    """A tiny model with random weights of a size that makes states matter."""
    return dummy_model(TINY[family], dtype, operations)


def dummy_model(tiny: Tiny, dtype: torch.dtype = torch.float32, operations: Operations | None = None) -> CausalModel:
    """A model of its own, for a test that changes it. Prepared for PLAIN operations, others can read it too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config_of(tiny)))
        model, _ = load_model(file, dtype, weights="dummy", progress=False, operations=operations)
    return model


def spec_of(family: str) -> MemorySpec:
    return MemorySpec(model_of(family).memories(CPU))


def make_engine(
    family: str, memory_bytes: int = 64 << 20, drafting: Drafting | None = None, **settings: object
) -> Engine:
    options = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory_bytes, **options)
    spec = replace(spec_of(family), draft_room=0 if drafting is None else drafting.most)
    runner = Runner(model_of(family), spec, memory_bytes, config.max_sequences, threads=1)
    return Engine(spec, runner, config, drafting=drafting)


def smallest_memory(family: str, length: int, max_sequences: int = 8, spec: MemorySpec | None = None) -> int:
    """Bytes in which one sequence of this length just fits; `spec` of a device that keeps things in another form."""
    spec, size = spec or spec_of(family), 1 << 12
    while True:
        try:
            if Ledger(spec, size, max_sequences, length).fits_alone(length):
                return size
        except OptionError:
            pass
        size = size * 9 // 8


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


@dataclass
class Ask:
    """A request, when it comes and when it is aborted (in steps)."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=lambda: greedy(8))
    step: int = 0
    abort_after: int | None = None
    snapshots: tuple[int, ...] = ()
    salt: bytes = b""

    def request(self) -> Request:
        prompt, stops = np.array(self.prompt, np.int32), frozenset(self.params.stop_token_ids)
        return Request(prompt, self.params, stops, self.salt, snapshots=self.snapshots)


def greedy(count: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, logprobs=0, **more)


def seeded(count: int, seed: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=1.0, seed=seed, logprobs=0, **more)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    digests: list[int | None] = field(default_factory=list)
    finish: FinishReason | None = None
    report: Report | None = None


def serve(engine: Engine, asks: list[Ask], max_steps: int = 4000) -> list[Answer]:
    """Answers in the order of the requests."""
    answers = [Answer() for _ in asks]
    numbers: dict[int, int] = {}
    for step in range(max_steps):
        for index, ask in enumerate(asks):
            if ask.step == step:
                numbers[engine.add(ask.request())] = index
        for number, index in numbers.items():
            after = asks[index].abort_after
            if after is not None and step == asks[index].step + after:
                engine.abort(number)
        for output in engine.step():
            answer = answers[numbers[output.sequence]]
            if output.token is not None:
                answer.tokens.append(output.token)
                answer.logprobs.append(output.logprob)
                answer.digests.append(output.digest)
            if output.finish is not None:
                answer.finish, answer.report = output.finish, engine.report(output.sequence)
        if engine.idle and step >= max(ask.step for ask in asks):
            return answers
    raise AssertionError("the engine does not come to an end")
