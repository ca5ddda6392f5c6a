"""Steps beside running streams stay within `max_step_ms`, by a scripted clock on the rolling-hash device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.scripted import ScriptedDrafting, drafted_workload
from tests.support.engine.properties import thorough
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import Workload, check_answers, run_workload
from weft.base.config import EngineConfig
from weft.base.errors import InvalidOption
from weft.base.options import Options
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.costs import ChunkCosts, LearnedCosts
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.pacing import Pacing
from weft.engine.request import Request

CELL = 4
# Milliseconds of a step on the scripted device: for itself, for each decode, for a chunk, for each of its tokens.
STEP, DECODE, CHUNK, TOKEN = 10.0, 1.0, 6.0, 0.5


def sizes(plan: Plan) -> tuple[int, int, int]:
    """Rows without a chunk, drafts, and tokens of chunks in a plan."""
    drafts = plan.draft_counts
    lengths = plan.end - plan.start
    chunks = lengths > 1 + drafts
    return int((~chunks).sum()), int(drafts.sum()), int(lengths[chunks].sum())


def milliseconds(plan: Plan) -> float:
    rows, drafts, prompts = sizes(plan)
    return STEP + DECODE * (rows + drafts) + (CHUNK + TOKEN * prompts if prompts else 0.0)


class Clock:
    """Time that passes only on the device."""

    def __init__(self, random: Random | None = None) -> None:
        self.now = 0.0
        self.random = random

    def __call__(self) -> float:
        return self.now

    def run(self, plan: Plan) -> None:
        noise = self.random.choice([0.5, 1.0, 1.0, 3.0, 50.0]) if self.random else 1.0
        self.now += noise * milliseconds(plan) / 1000


class Timed(Engine):
    """An engine whose device takes scripted times. `launched` are its plans, each with the bound that held for it.

    Every plan is checked against the prediction that it was made with.
    """

    def __init__(self, spec, device, config, clock: Clock, **more) -> None:
        super().__init__(spec, device, config, now=clock, **more)
        self.launched: list[tuple[Plan, int | None]] = []
        budgets = self.budgets = []
        pacing, allow = self.planner.pacing, self.planner.pacing.prompt_tokens
        pacing.prompt_tokens = lambda *asked: budgets.append((asked, allow(*asked))) or budgets[-1][1]
        launch, land = device.launch, device.land

        def check(plan: Plan) -> dict:
            budget = None
            if budgets:
                (rows, drafts, _), budget = budgets[-1]
                prompts = len(plan.tokens) - rows - drafts
                assert prompts <= budget, "a plan has more prompt tokens than fit into the bound"
                known = pacing.chunks.known and prompts > self.ledger.cell
                assert prompts <= self.ledger.cell or known
                assert not known or pacing.predicted(rows, drafts, prompts) <= pacing.bound(rows) + 1e-9
            self.launched.append((plan, budget))
            return {"plan": plan, "flight": launch(plan)}

        def finish(flight: dict) -> Landing:
            clock.run(flight["plan"])
            return land(flight["flight"])

        device.launch, device.land = check, finish

    def step(self):
        self.budgets.clear()
        return super().step()


def paced_workload(seed: int) -> Workload:
    random = Random(f"paced {seed}")
    exact = random.random() < 0.4
    workload = drafted_workload(seed, 8, exact=exact, max_tokens_per_step=random.choice([8, 17, 64]), max_sequences=8)
    bound = random.choice(
        [{"max_step_ms": random.choice([0.1, 15.0, 25.0, 60.0])}, {"max_step_ms": 20.0, "max_step_decodes": 3.0}]
    )
    return replace(workload, config=replace(workload.config, **bound))


def run_paced(seed: int) -> Engine:
    workload, clock = paced_workload(seed), Clock(Random(f"noise {seed}"))
    drafting = None
    if seed % 2 and not workload.config.exact:
        answers = {tuple(a.prompt): a.answer(workload.spec) for a in workload.arrivals}
        drafting = ScriptedDrafting(answers, workload.spec.draft_room, seed)
        drafting.costs = LearnedCosts()
    run = run_workload(workload, partial(Timed, clock=clock, drafting=drafting))
    check_answers(workload, run)
    return run.engine


def test_steps_beside_decodes_stay_within_the_bound_and_answers_stay_the_same() -> None:
    shortened = 0

    @thorough(25)
    @given(seed=st.integers(0, 1 << 40))
    def check(seed: int) -> None:
        nonlocal shortened
        shortened += run_paced(seed).planner.pacing.shortened

    check()
    assert shortened > 0


def stream_beside_prompt(length: int = 300, depth: int = 0, exact: bool = False, **bound: float) -> Timed:
    """Run a stream, and after some steps a long prompt beside it."""
    clock, spec = Clock(), rolling_spec(cell=CELL)
    config = EngineConfig(
        memory_bytes=1 << 20, max_sequences=4, max_length=1024, depth=depth, exact=exact, paranoid=True, **bound
    )
    engine = Timed(spec, RollingDevice(spec, config.memory_bytes, 4), config, clock)
    engine.add(request(12, 300))
    for _ in range(20):
        engine.step()
    engine.add(request(length, 3, first=50))
    while not engine.idle:
        assert all(output.finish in (None, FinishReason.LENGTH) for output in engine.step())
    return engine


def request(length: int, count: int, first: int = 0) -> Request:
    prompt = np.arange(first, first + length, dtype=np.int32) % 89
    return Request(prompt, SamplingParams(max_tokens=count, temperature=0.0))


def chunks_of(engine: Timed) -> list[int]:
    """Tokens of the long prompt in each step that has some."""
    found = [sizes(plan)[2] for plan, _ in engine.launched[1:]]
    return [prompts for prompts in found if prompts]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("exact", [False, True])
def test_chunks_grow_to_what_the_bound_allows(depth: int, exact: bool) -> None:
    engine = stream_beside_prompt(depth=depth, exact=exact, max_step_ms=30.0)
    chunks = chunks_of(engine)
    # 30 ms less a step of one decode, and less a chunk's own cost: 26 tokens.
    assert max(chunks) == 24
    assert chunks.count(24) > 5
    assert max(milliseconds(plan) for plan, _ in engine.launched[1:]) <= 30.0
    assert all(prompts % CELL == 0 for prompts in chunks[:-1])


@pytest.mark.parametrize("exact", [False, True])
def test_a_long_prompt_progresses_by_a_cell_where_decodes_take_all_the_time(exact: bool) -> None:
    engine = stream_beside_prompt(length=40, exact=exact, max_step_ms=0.5)
    assert chunks_of(engine) == [CELL] * 10
    steps = [sizes(plan)[2] for plan, _ in engine.launched]
    first = steps.index(CELL, 1)
    assert all(steps[first : first + 10]), "a step without a part of the prompt"
    assert engine.planner.pacing.shortened == 9


def test_the_bound_does_not_apply_without_running_streams() -> None:
    clock, spec = Clock(), rolling_spec(cell=CELL)
    config = EngineConfig(memory_bytes=1 << 20, max_sequences=4, max_length=1024, max_step_ms=0.5)
    engine = Timed(spec, RollingDevice(spec, config.memory_bytes, 4), config, clock)
    for _ in range(2):
        engine.add(request(400, 2))
    engine.step()
    plan, budget = engine.launched[0]
    assert len(plan.tokens) >= 400
    assert budget is None


def test_auto_allows_three_decode_steps() -> None:
    engine = stream_beside_prompt(max_step_ms=1.0, max_step_decodes=3.0)
    # Three steps of one decode are 33 ms: 32 tokens.
    assert chunks_of(engine)[-4:-1] == [32] * 3


def test_one_slow_step_does_not_stop_prompts() -> None:
    costs = ChunkCosts()
    for tokens in (64, 128, 256, 128) * 4:
        costs.observe(tokens, 0.001 * tokens)
    costs.observe(128, 60.0)
    assert costs.tokens(0.25) >= 64
    for _ in range(12):
        costs.observe(64, 0.064)
    # Up to twice as many as the last chunks had.
    assert costs.tokens(0.25) == 128


def test_chunks_of_one_size_promise_nothing_for_larger_ones() -> None:
    costs = ChunkCosts()
    for _ in range(5):
        costs.observe(64, 0.02)
    assert costs.tokens(0.02) == 64
    assert costs.seconds(128) == pytest.approx(0.04)


@pytest.mark.parametrize("value", [0, -1, "fast", "1e9", True, float("nan"), float("inf"), None])
def test_a_bound_that_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="max_step_ms"):
        Options(max_step_ms=value)


def test_unbounded_engines_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Pacing, "observe", lambda self, plan, seconds: seen.append(plan))
    engine = stream_beside_prompt()
    assert not seen
    assert chunks_of(engine) == [300]
