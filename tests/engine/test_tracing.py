"""What is noted of requests and steps adds up to what the engine reports, and changes no plan."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.support.engine.properties import record_plans, same_plan
from tests.support.engine.watched import WatchedEngine, judge
from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.tiered import run_tiered, tiered_workload
from tests.support.hashed.workloads import Run, drive, random_workload, run_and_check
from weft.base.plan import Plan
from weft.engine.sequence import Sequence
from weft.engine.tracing import tracer
from weft.engine.tracing.events import Wait
from weft.engine.tracing.tracer import Lane, Tracer

BUILT = ("Waits", "Starts", "Computes", "Decoded", "Preempted", "Ends", "Runs", "StepFacts", "TraceBatch", "Lane")
SEEDS = 120
Patch = pytest.MonkeyPatch


def watch_from(patch: Patch, seed: int) -> None:
    patch.setattr(WatchedEngine, "first_step", Random(seed).choice([0, 0, 1, 5, 20]))


def judged(patch: Patch, seed: int) -> tuple[set[str], set[Wait]]:
    """Run a workload, check its events, and return the kinds of them, and what requests waited for."""
    watch_from(patch, seed)
    run = run_and_check(random_workload(seed), WatchedEngine)
    assert isinstance(run.engine, WatchedEngine)
    if run.engine.steps <= run.engine.first_step:
        return set(), set()
    kinds = {kind for seen in judge(run.engine).values() for kind in seen.kinds}
    waits = {event.why for batch in run.engine.batches for event in batch.events if isinstance(event, tracer.Waits)}
    return kinds, waits


def test_events_add_up_to_what_the_engine_reports(monkeypatch: Patch) -> None:
    kinds: set[str] = set()
    waits: set[Wait] = set()
    for seed in range(SEEDS // 2):
        more_kinds, more_waits = judged(monkeypatch, seed)
        kinds |= more_kinds
        waits |= more_waits
    assert kinds == {"Waits", "Starts", "Computes", "Decoded", "Preempted", "Ends"}
    assert waits >= {Wait.TURN, Wait.SEQUENCES, Wait.MEMORY, Wait.PREFIX, Wait.STEP}


def test_a_load_is_a_wait_of_its_own() -> None:
    found: set[Wait] = set()
    for seed in range(30):
        run = run_tiered(tiered_workload(seed), seed, engine_class=WatchedEngine)
        assert isinstance(run.engine, WatchedEngine)
        judge(run.engine)
        loaded = {name for name, report in run.engine.reports.items() if report.loading_seconds}
        waits = [event for batch in run.engine.batches for event in batch.events if isinstance(event, tracer.Waits)]
        assert loaded <= {event.id for event in waits if event.why is Wait.LOAD}
        found |= {event.why for event in waits}
    assert Wait.LOAD in found


def test_a_step_begins_before_its_launch_in_which_a_cpu_computes() -> None:
    now = 0.0

    class Slow(RollingDevice):
        def launch(self, plan: Plan) -> object:
            nonlocal now
            now += 3.0
            return super().launch(plan)

    workload = random_workload(1, depth=0)
    config = workload.config
    device = Slow(workload.spec, config.memory_bytes, config.max_sequences, lazy=False)
    engine = WatchedEngine(workload.spec, device, config, now=lambda: now)
    drive(workload, Run(engine, device))
    steps = [step.ms for batch in engine.batches for step in batch.steps]
    assert steps
    assert set(steps) == {3000.0}


@pytest.mark.parametrize("seed", range(20))
def test_plans_do_not_depend_on_who_watches(monkeypatch: Patch, seed: int) -> None:
    plain = record_plans(random_workload(seed))
    watch_from(monkeypatch, seed)
    watched = record_plans(random_workload(seed), WatchedEngine)
    assert len(plain) == len(watched)
    assert all(same_plan(one, other) for one, other in zip(plain, watched, strict=True))


def test_nothing_is_built_unless_a_client_watches(monkeypatch: Patch) -> None:
    built = count_built(monkeypatch)
    run_and_check(random_workload(3))
    assert built == []
    run = run_and_check(random_workload(3), WatchedEngine)
    assert {"Lane", "Waits", "Starts", "Computes", "Decoded", "Ends", "StepFacts"} <= set(built)
    # After it has gone, nothing is left of it.
    before = len(run.engine._companions)
    run.engine.watch(False)
    assert (run.engine.tracer, len(run.engine._companions)) == (None, before - 1)


def count_built(patch: Patch) -> list[str]:
    """Return a list to which the name of every event is added when it is built."""
    built: list[str] = []
    for name in BUILT:
        kind = getattr(tracer, name)

        def build(*given: object, kind: Callable[..., object] = kind, **named: object) -> object:
            built.append(kind.__name__)
            return kind(*given, **named)

        patch.setattr(tracer, name, build)
    return built


# planted bugs ---------------------------------------------------------------------------------------------------------


def forgets_what_was_counted(patch: Patch) -> None:
    """Tokens before an opening are reported once more."""
    start = Lane.__init__

    def begin(self: Lane, sequence: Sequence, at: float) -> None:
        start(self, sequence, at)
        self.tokens = 0

    patch.setattr(Lane, "__init__", begin)


def misses_preemptions(patch: Patch) -> None:
    patch.setattr(Tracer, "_note_preemptions", lambda self: None)


def ends_before_its_last_tokens(patch: Patch) -> None:
    patch.setattr(Tracer, "_note_decodes", lambda self, lane, at: None)


def reports_the_plan_instead_of_the_row(patch: Patch) -> None:
    note = Tracer._note_chunk
    patch.setattr(Tracer, "_note_chunk", lambda self, lane, start, end, at: note(self, lane, start + 1, end + 1, at))


@pytest.mark.parametrize(
    "sow",
    [forgets_what_was_counted, misses_preemptions, ends_before_its_last_tokens, reports_the_plan_instead_of_the_row],
)
def test_a_tracer_that_tells_something_else_is_caught(monkeypatch: Patch, sow: Callable[[Patch], None]) -> None:
    sow(monkeypatch)
    with pytest.raises(AssertionError):
        [judged(monkeypatch, seed) for seed in range(SEEDS)]
