"""A vector is that of a lone cold run, whatever is cached, chunked, preempted or computed beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import (
    Arrival,
    Run,
    Workload,
    random_workload,
    run_and_check,
    tight_memory,
    with_vectors,
)
from weft.base.config import EngineConfig
from weft.base.errors import RequestError
from weft.base.plan import Plan
from weft.base.sampling import SamplingParams
from weft.engine import landed
from weft.engine.events import Report, VectorSum
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.engine.sequence import Sequence
from weft.memory.misses import Reason

SEEDS = 60


@pytest.mark.parametrize("part", parts(2))
@thorough(30)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 10), exact=st.booleans())
def test_every_vector_is_that_of_a_lone_cold_run(part: int, seed: int, count: int, exact: bool) -> None:
    seed = seed_of(part, seed)
    run_and_check(with_vectors(random_workload(seed, count, exact=exact), seed))


def preempted_mean(depth: int) -> Run:
    """An answer grows until a request for a mean, which reads a token a step, must make room."""
    spec = rolling_spec(recurrent=False)
    answer = Arrival(list(range(40, 70)), 33, 0, None, b"", 0, (), frozenset())
    mean = Arrival(list(range(24)), 0, 1, None, b"", 0, (), frozenset(), vector_from=0)
    config = EngineConfig(
        memory_bytes=tight_memory(spec, [answer], 1.0), max_sequences=2, max_tokens_per_step=2, max_length=64,
        depth=depth, paranoid=True,
    )  # fmt: skip
    return run_and_check(Workload(spec, [answer, mean], config))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_mean_is_that_of_a_lone_cold_run(depth: int) -> None:
    assert preempted_mean(depth).engine.planner.preemptions


# bugs -----------------------------------------------------------------------------------------------------------------


def reads_the_row_of_another_request(patch: pytest.MonkeyPatch) -> None:
    original = RollingDevice.execute

    def execute(self, plan: Plan):
        index = plan.vector_index.copy()
        # The token before, which is another request's at the start of a row.
        index[plan.vector_count == 1] -= index[plan.vector_count == 1] > 0
        return original(self, plan if not len(index) else replace(plan, vector_index=index))

    patch.setattr(RollingDevice, "execute", execute)


def reads_the_chunk_before_again(patch: pytest.MonkeyPatch) -> None:
    """The tokens that a preempted request has computed count twice."""
    patch.setattr(Sequence, "summed", property(lambda self: self.request.params.vector_from or 0))


def reuses_what_a_mean_must_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "reuse_limit", property(lambda self: len(self.known) - 1))


def gives_sums_to_sequences_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    original = landed.take_vectors

    def take(step, landing):
        original(replace(step, vectors=step.vectors[::-1]), landing)

    patch.setattr("weft.engine.loop.take_vectors", take)


def forgets_chunks_before_the_last(patch: pytest.MonkeyPatch) -> None:
    original = VectorSum.add

    def add(self, vector, tokens):
        before = self.tokens
        self.__init__()
        original(self, vector, tokens)
        self.tokens += before

    patch.setattr(VectorSum, "add", add)


PLANTS = [
    reads_the_row_of_another_request,
    reads_the_chunk_before_again,
    reuses_what_a_mean_must_read,
    gives_sums_to_sequences_in_the_wrong_order,
    forgets_chunks_before_the_last,
]


@pytest.mark.parametrize("sow", PLANTS, ids=lambda sow: sow.__name__)
def test_a_planted_bug_is_noticed(sow, monkeypatch) -> None:
    sow(monkeypatch)
    for seed in range(SEEDS):
        try:
            preempted_mean(seed) if seed < 2 else run_and_check(with_vectors(random_workload(seed, 6), seed))
        except AssertionError:
            return
    pytest.fail("the planted bug was not caught")


# what is reused -------------------------------------------------------------------------------------------------------


def engine_of(**more) -> Engine:
    spec = rolling_spec()
    config = EngineConfig(memory_bytes=1 << 16, max_sequences=4, max_tokens_per_step=64, max_length=100, **more)
    return Engine(spec, RollingDevice(spec, config.memory_bytes, config.max_sequences), config)


def ask(engine: Engine, prompt: list[int], first: int) -> Report:
    number = engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=0, vector_from=first)))
    while not engine.idle:
        engine.step()
    return engine.report(number)


def test_a_last_token_reuses_a_prefix_and_a_mean_only_what_is_before_its_tokens() -> None:
    engine, stem = engine_of(), list(range(40))
    ask(engine, [*stem, 50], 40)
    assert ask(engine, [*stem, 51], 40).cached_tokens == 40
    mean = ask(engine, [*stem, 52], 0)
    assert (mean.cached_tokens, mean.miss.reason, mean.miss.tokens_lost) == (0, Reason.MEAN_WANTED, 40)
    assert ask(engine, [*stem, 53], 20).cached_tokens == 20
    assert mean.vector.tokens == 41


def test_a_vector_has_no_answer_and_is_of_the_prompt() -> None:
    with pytest.raises(RequestError, match="max_tokens must be 0 with vector_from, got 3"):
        SamplingParams(max_tokens=3, vector_from=0)
    with pytest.raises(RequestError, match="vector_from must be less than the prompt's length 2, got 2"):
        ask(engine_of(), [1, 2], 2)
