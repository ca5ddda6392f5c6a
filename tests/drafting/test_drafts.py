"""Drafts change no answer: random acceptance on the rolling-hash device, with everything else that can happen to a row.

Scripted drafts continue the oracle's answer and are wrong at random places, so rows are settled anywhere: inside a
cell, at its border and beyond it, while other rows are a flight ahead, memory is short, and requests are aborted
between launch and landing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_properties import parts, thorough
from tests.support.hashed.rolling import POISON, VOCABULARY, RollingDevice, oracle, rolling_spec
from tests.support.hashed.workloads import Workload, check_answers, random_workload, run_workload, tight_memory
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.policy.suffix import SharedTexts
from weft.drafting.rows import MOST_HISTORY
from weft.engine.loop import Engine
from weft.engine.request import Request

EXAMPLES = 240


class Script(SequenceDrafts):
    """Drafts of one sequence from the answer that is known in advance, each wrong with some probability."""

    def __init__(self, random: Random, prompt: np.ndarray, answer: list[int], most: int) -> None:
        super().__init__(prompt, b"", most, suffixes=False)
        self.random = random
        self.answer = answer
        self.wrong = random.choice([0.0, 0.1, 0.3, 1.0])

    def pause(self) -> int:
        """Never pause, so that drafts are refused in every step."""
        return 0

    def find_drafts(self, answer: list[int], most: int, shared: SharedTexts, ahead: int = 0) -> RowDrafts | None:
        count = self.random.randint(0, min(most, self.most)) + ahead if most > 0 else 0
        tokens = (self.answer[len(answer) :] + [0] * count)[:count]
        tokens = [(t + 1) % VOCABULARY if self.random.random() < self.wrong else t for t in tokens]
        return RowDrafts("scripted", "scripted", tuple(tokens), (0.99,) * len(tokens)) if tokens else None


class ScriptedDrafting(Drafting):
    """Drafts from the answers to all prompts."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], most: int, seed: int) -> None:
        super().__init__(most, costs=FreeDrafts())
        self.random = Random(f"drafts {seed}")
        self.answers = answers

    def begin(self, prompt, salt, most, prediction, grammar=None):
        return Script(self.random, prompt, self.answers[tuple(prompt.tolist())], self.most)

    def plans_ahead(self, known: float, unknown: float, lost: float) -> bool:
        return self.random.random() < 0.8


class Unfollowed(RollingDevice):
    """A device on which only the host knows where drafts end."""

    builds_on_flight = None

    def leave_on_board(self, plan: Plan, tokens: list[list[int]], sampled: list[int]) -> None:
        super().leave_on_board(plan, tokens, sampled)
        for seat in plan.seat[plan.drafts.counts > 0].tolist() if len(plan.drafts.counts) else ():
            self.board[seat] = POISON


def drafted_workload(seed: int, count: int = 6, **overrides: object) -> Workload:
    random = Random(f"room {seed}")
    workload = random_workload(seed, count, **overrides)
    spec = replace(workload.spec, draft_room=random.randint(1, 6))
    memory = tight_memory(spec, workload.arrivals, random.choice([1.0, 1.0, 1.3, 2.0, 6.0]))
    config = replace(workload.config, memory_bytes=memory)
    return Workload(spec, workload.arrivals, config, workload.lazy)


def run_drafted(seed: int, count: int = 6, **overrides: object) -> Drafting:
    """Run a workload with drafts, check all answers, and return what was drafted."""
    workload = drafted_workload(seed, count, **overrides)
    answers = {tuple(a.prompt): a.answer(workload.spec) for a in workload.arrivals}
    drafting = ScriptedDrafting(answers, workload.spec.draft_room, seed)
    kind = Unfollowed if seed % 2 else RollingDevice
    check_answers(workload, run_workload(workload, partial(Engine, drafting=drafting), kind))
    return drafting


@pytest.mark.parametrize("part", parts(1, 8))
def test_every_answer_is_the_undrafted_one(part: int) -> None:
    @thorough(EXAMPLES)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
    def check(seed: int, count: int) -> None:
        run_drafted(seed * 8 + part, count)

    check()


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_are_accepted_and_refused_at_every_depth(depth: int) -> None:
    proposed = accepted = 0
    for seed in range(20):
        counts = run_drafted(seed, depth=depth).counts
        proposed, accepted = proposed + counts.proposed.total(), accepted + counts.accepted.total()
    assert accepted > 40
    assert proposed - accepted > 40


def plans_of(asked: int, drafting_rows: int, depth: int = 1, kind: type = Unfollowed) -> tuple[Engine, list]:
    """An engine with rows of which only the first ones draft, and its plans, decoded to the end."""
    spec = rolling_spec(cell=4, room=3)
    prompts = [[number + 1] * 3 for number in range(asked)]
    answers = {tuple(prompt): oracle(spec, prompt, 24) for prompt in prompts}

    class SomeDraft(ScriptedDrafting):
        def begin(self, prompt, salt, most, prediction, grammar=None):
            if prompt[0] > drafting_rows:
                return None
            script = super().begin(prompt, salt, most, prediction)
            script.wrong = 0.0
            return script

    config = EngineConfig(memory_bytes=1 << 16, max_sequences=asked, max_length=64, depth=depth, paranoid=True)
    device = kind(spec, config.memory_bytes, asked, lazy=True)
    plans, launch = [], device.launch
    device.launch = lambda plan: plans.append((plan, engine.planner.landed)) or launch(plan)
    engine = Engine(spec, device, config, drafting=SomeDraft(answers, 3, seed=1))
    for prompt in prompts:
        engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=24, temperature=0.0)))
    found: dict[int, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            found.setdefault(output.sequence, []).append(output.token)
    assert list(found.values()) == list(answers.values())
    return engine, plans


def test_a_row_with_drafts_in_flight_is_in_no_other_plan() -> None:
    _, plans = plans_of(asked=8, drafting_rows=1)
    flying: dict[int, int] = {}
    for plan, landed in plans:
        assert not {seat for seat, number in flying.items() if number > landed} & set(plan.seat.tolist())
        flying |= {int(seat): plan.number for seat in plan.seat[plan.draft_counts > 0]}
    assert len(flying) == 1


def test_rows_without_drafts_stay_a_step_ahead_of_few_with() -> None:
    _, plans = plans_of(asked=8, drafting_rows=1)
    after_drafts = [landed < before.number for (before, _), (_, landed) in pairwise(plans) if len(before.drafts.counts)]
    assert len(after_drafts) > 2
    assert all(after_drafts[:-1])


def test_a_step_waits_for_its_predecessor_if_most_rows_drafted_in_it() -> None:
    _, plans = plans_of(asked=4, drafting_rows=4)
    for (before, _), (_, landed) in pairwise(plans):
        if (before.draft_counts > 0).sum() > 1:
            assert landed == before.number


def test_no_draft_is_computed_beyond_the_last_token_wanted() -> None:
    engine, plans = plans_of(asked=2, drafting_rows=2, depth=0)
    assert engine.planner.drafting.counts.accepted.total() > 10
    # The last token is sampled and never computed.
    assert max(int(plan.end.max()) for plan, _ in plans) == 3 + 24 - 1


class RecordingDevice(RollingDevice):
    """Answers anything, and records the drafts and the histories of each step."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.drafts: list[int] = []
        self.histories: list[int] = []

    def execute(self, plan: Plan) -> Landing:
        self.drafts.append(int(plan.drafts.counts.sum()))
        self.histories.append(len(plan.sampling.history_token))
        return Landing(np.zeros(plan.sample_count, np.int32), None, None)


@pytest.mark.parametrize(("length", "most"), [(100, 6), (4000, 3), (9000, 0)])
def test_rows_with_penalties_draft_as_far_as_their_histories_are_bounded(length: int, most: int) -> None:
    spec = rolling_spec(room=6, recurrent=False)
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=1, max_length=length + 20, max_tokens_per_step=length)
    engine = Engine(
        spec, RecordingDevice(spec, config.memory_bytes, 1), config, drafting=Drafting(6, costs=FreeDrafts())
    )
    guess = np.zeros(10, np.int32)
    params = SamplingParams(max_tokens=10, repetition_penalty=1.1)
    engine.add(Request(np.ones(length, np.int32), params, prediction=guess))
    while not engine.idle:
        engine.step()
    device = engine._device
    assert max(device.drafts) == most
    assert max(device.histories) <= max(MOST_HISTORY, length + 10)
