"""Engines without a model: what is left is the cost, and the correctness, of everything around one.

Run as a program with the number of a file descriptor it is an engine process that needs no weights.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.backend import ModelInfo
from weft.base.errors import InvalidField, OptionError
from weft.base.options import Options
from weft.engine.events import FinishReason, Output, PromptScore, PromptScores, Report, VectorSum
from weft.engine.load import ReplicaLoad
from weft.engine.request import Request
from weft.engine.tracing.events import Runs
from weft.memory.misses import Miss, Reason
from weft.start.engine_process import main

PROGRAM = (sys.executable, str(Path(__file__).resolve()))
VOCABULARY = 256
MAX_LENGTH = 1 << 20
# A prompt that begins with this token makes the step fail that would answer it.
POISON = 13


class InstantEngine:
    """A token for every request at each step; answer i to a prompt that ends with t is t + 1 + i, modulo 256.

    Its vector is t and the length of the prompt.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self._open: dict[int, tuple[Request, int]] = {}
        self._reports: dict[int, Report] = {}
        self._outputs: list[Output] = []
        self._next = 0
        self._steps = 0
        self._dropped: dict[int, dict[str, Any]] = {}

    def constrain(self, request: Request) -> None:
        return None

    def add(self, request: Request, constraint: None = None) -> int:
        if not len(request.prompt):
            raise InvalidField("prompt", "must have at least one token")
        if len(request.prompt) + request.params.max_tokens > MAX_LENGTH:
            raise InvalidField("prompt", f"plus max_tokens exceed {MAX_LENGTH}")
        self._next += 1
        self._open[self._next] = request, 0
        miss = Miss(Reason.NEVER_COMPUTED, 0, 0, len(request.prompt), len(request.prompt))
        scores = request.params.prompt_logprobs
        found = [] if scores is None else [PromptScore(-0.5, [(7, -0.5)] * scores) for _ in request.prompt[1:]]
        vector = np.array([request.prompt[-1], len(request.prompt)], np.float32)
        embedded = VectorSum() if request.params.vector_from is None else VectorSum(vector)
        self._reports[self._next] = Report(miss=miss, prompt_scores=PromptScores(found), vector=embedded)
        return self._next

    def abort(self, number: int) -> None:
        self._end(number, FinishReason.ABORT)

    def finish(self, number: int) -> None:
        self._end(number, FinishReason.STOP)

    def _end(self, number: int, reason: FinishReason) -> None:
        if self._open.pop(number, None) is not None:
            self._outputs.append(Output(number, None, finish=reason))

    def report(self, number: int) -> Report:
        return self._reports[number]

    def forget(self, number: int) -> None:
        del self._reports[number]

    def take_transfers(self) -> None:
        pass

    def watch(self, wanted: bool) -> None:
        pass

    def request_facts(self, name: str) -> list[Runs]:
        return []

    tracer = None

    def on_transfers(self, wake) -> None:
        pass

    def write_behind(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def idle(self) -> bool:
        return not self._open and not self._outputs

    def step(self) -> list[Output]:
        self._steps += 1
        if self._step_seconds:
            time.sleep(self._step_seconds)
        outputs, self._outputs = self._outputs, []
        for number, (request, done) in list(self._open.items()):
            outputs.append(self._next_output(number, request, done))
        return outputs

    def _next_output(self, number: int, request: Request, done: int) -> Output:
        if request.prompt[0] == POISON:
            raise RuntimeError("a secret of the engine's inside")
        params = request.params
        if not params.max_tokens:
            del self._open[number]
            return Output(number, None, finish=FinishReason.LENGTH)
        token = (int(request.prompt[-1]) + 1 + done) % VOCABULARY
        output = Output(number, token)
        if params.logprobs is not None:
            output.logprob, output.top = -1.5, [(token, -1.5)] * params.logprobs
        if token in request.stop_tokens:
            output.finish = FinishReason.STOP
        elif done + 1 >= params.max_tokens:
            output.finish = FinishReason.LENGTH
        if output.finish is None:
            self._open[number] = request, done + 1
        else:
            del self._open[number]
        return output

    def flush(self) -> int:
        return 0

    def begin_drop(self, number: int, tenant: bytes | None, prefix: bytes | None) -> None:
        self._dropped[number] = {"dropped_tokens": {}, "left_tokens": 0}

    def take_dropped(self) -> dict[int, dict[str, Any]]:
        dropped, self._dropped = self._dropped, {}
        return dropped

    def take_loaded(self) -> dict[int, dict[str, Any]]:
        return {}

    def stats(self) -> dict[str, Any]:
        # Counting looks at every object: only where they are few, in a process that has not imported the tests.
        frozen = gc.get_freeze_count() if __name__ == "__main__" else 0
        return {"running": len(self._open), "waiting": 0, "steps": self._steps, "frozen": frozen}

    journal = None
    in_flight = copying = False

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(running=len(self._open))

    def cache_report(self, limit: int) -> dict[str, Any]:
        return {"prefixes": [], "limit": limit}


def answer(prompt: list[int], count: int) -> list[int]:
    """What an instant engine says."""
    return [(prompt[-1] + 1 + index) % VOCABULARY for index in range(count)]


def fake_info(**settings: Any) -> ModelInfo:
    return ModelInfo("instant", "Instant", "float32", VOCABULARY, MAX_LENGTH, 1 << 20, 1 << 20, 4096, settings)


def load_instant(options: Options, progress: bool) -> tuple[InstantEngine, ModelInfo]:
    """`model` may name what shall go wrong, or how many seconds a step takes."""
    if options.model == "unloadable":
        raise OptionError("model: there is no such thing")
    if options.model == "broken":
        raise RuntimeError("a bug")
    return InstantEngine(float(options.model or 0)), fake_info(max_sequences=options.max_sequences)


if __name__ == "__main__":
    main(load_instant)
