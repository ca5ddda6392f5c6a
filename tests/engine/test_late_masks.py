"""Rows of a grammar take part in every step at depth 1: their masks follow when the step before has landed.

The mask of the constraint here depends on every token of the answer, so a mask that is one token old allows tokens
that the right one does not, and the answer differs from the one at depth 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.scripted import drafted_workload
from tests.support.engine.late_masks import EarlyDevice, HashedConstraint
from tests.support.engine.properties import parts, thorough
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import Run, Workload, run_workload
from tests.support.models.engines import model_of, spec_of
from weft.base.config import EngineConfig
from weft.base.constraint import Constraint
from weft.base.plan import Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.runner.runner import Runner, WaitingFlight


class ConstrainedEngine(Engine):
    """Constrains the answers to some prompts."""

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        if sum(request.prompt.tolist()) % 3:
            constraint = HashedConstraint(len(request.prompt))
        return super().add(request, constraint)


def answers(workload: Workload, depth: int, drafts: bool) -> Run:
    config = replace(workload.config, depth=depth)
    drafting = Drafting(workload.spec.draft_room, costs=FreeDrafts()) if drafts else None
    return run_workload(replace(workload, config=config), partial(ConstrainedEngine, drafting=drafting))


def compare(seed: int, count: int = 6) -> int:
    """Compare the answers at both depths; return how many samples had their mask after the launch."""
    workload = drafted_workload(seed, count)
    wanted, found = answers(workload, 0, drafts=False), answers(workload, 1, drafts=bool(seed % 2))
    for index, answer in wanted.answers.items():
        ends = {wanted.finished[index], found.finished[index]}
        if FinishReason.ABORT in ends:
            length = min(len(answer), len(found.answers[index]))
            assert found.answers[index][:length] == answer[:length]
        else:
            assert found.answers[index] == answer
    assert not found.engine.ledger.leases
    return found.device.late_masks


@pytest.mark.parametrize("part", parts(4))
def test_every_answer_is_the_one_at_depth_0(part: int) -> None:
    late = []

    @thorough(15)
    @given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
    def check(seed: int, count: int) -> None:
        late.append(compare(seed * 4 + part, count))

    check()
    assert sum(late) > 50


def decode(rows: int, constrained: int, kind: type[RollingDevice] = RollingDevice) -> tuple[list[Plan], Engine]:
    """Answer with 30 tokens a row at depth 1, and return the plans without prompts."""
    spec = rolling_spec(cell=4)
    config = EngineConfig(memory_bytes=1 << 16, max_sequences=rows, max_length=64, depth=1, paranoid=True)
    device, plans = kind(spec, config.memory_bytes, rows, lazy=True), []
    launch = device.launch
    device.launch = lambda plan: plans.append(plan) or launch(plan)
    engine = Engine(spec, device, config)
    for number in range(rows):
        constraint = HashedConstraint(number) if number < constrained else None
        engine.add(Request(np.array([number + 1], np.int32), SamplingParams(max_tokens=30, temperature=0)), constraint)
    while not engine.idle:
        engine.step()
    return plans[1:], engine


@pytest.mark.parametrize("constrained", [1, 2, 4])
def test_a_constrained_row_is_in_every_step(constrained: int) -> None:
    plans, _ = decode(4, constrained)
    # The first token comes with the prompt, and at depth 1 one token too many is computed.
    assert len(plans) <= 30
    assert all(plan.rows == 4 for plan in plans[:29])
    assert all(plan.sampling.awaiting_mask.tolist() == list(range(constrained)) for plan in plans[:29])


def test_steps_without_constrained_rows_wait_for_no_mask() -> None:
    plans, engine = decode(4, 0)
    assert not any(len(plan.sampling.awaiting_mask) for plan in plans)
    assert engine._device.late_masks == 0


def test_on_a_device_that_takes_no_masks_later_a_constrained_row_sits_out_every_other_step() -> None:
    plans, _ = decode(4, 1, EarlyDevice)
    assert sum(0 in plan.seat for plan in plans[:28]) == 14
    assert not any(len(plan.sampling.awaiting_mask) for plan in plans)


def test_a_step_that_waits_for_masks_has_computed_nothing_for_certain() -> None:
    """Otherwise prefixes would leave a GPU before the step without marks has written them."""
    runner = Runner(model_of("llama"), spec_of("llama"), 1 << 20, 4, threads=1)
    [plan] = decode(1, 1)[0][:1]
    flight = WaitingFlight(plan, torch.zeros(1, 4), torch.zeros(1), None)
    assert not runner.landed(flight)
    assert not runner.has_computed(flight, 0)
