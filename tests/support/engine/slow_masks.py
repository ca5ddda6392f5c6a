"""Masks that take long, in a thread or in a step."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np

from tests.support.drafting.scripted import drafted_workload
from tests.support.engine.late_masks import HashedConstraint
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from tests.support.hashed.workloads import Run, Workload, run_workload
from tests.support.servers.held_steps import SECONDS
from weft.base.config import EngineConfig
from weft.base.constraint import Constraint
from weft.base.errors import InvalidField
from weft.base.plan import Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.events import FinishReason, Output
from weft.engine.loop import Engine
from weft.engine.masks import STEP_SECONDS
from weft.engine.request import Request

ANSWER = 12


class HeldConstraint(HashedConstraint):
    """A constraint whose masks are found when they may be: `take` waits from the given token on, if it is slow."""

    def __init__(self, state: int, slow_from: int = 0, ends: int = 1 << 30, breaks: int = 1 << 30) -> None:
        super().__init__(state)
        self.slow_from, self.ends, self.breaks = slow_from, ends, breaks
        self.taken = 0
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.engine_thread = threading.get_ident()

    @property
    def slow(self) -> bool:
        return self.taken >= self.slow_from

    @property
    def ended(self) -> bool:
        return self.taken >= self.ends

    def take(self, token: int) -> None:
        if self.slow:
            assert threading.get_ident() != self.engine_thread, "a slow mask was looked for between two steps"
            self.begun.release()
            assert self.allowed.acquire(timeout=SECONDS)
        super().take(token)
        self.taken += 1
        if self.taken >= self.breaks:
            raise InvalidField("grammar", "is too ambiguous")

    def allow(self, count: int = 1 << 10) -> None:
        self.allowed.release(count)


class Watched:
    """An engine on the rolling-hash device, what it planned, and its answers."""

    def __init__(self, rows: int, depth: int, kind: type[RollingDevice] = RollingDevice) -> None:
        spec = rolling_spec(cell=4)
        config = EngineConfig(memory_bytes=1 << 16, max_sequences=rows, max_length=64, depth=depth, paranoid=True)
        self.device = kind(spec, config.memory_bytes, rows, lazy=depth > 0)
        self.plans: list[Plan] = []
        launch = self.device.launch
        self.device.launch = lambda plan: self.plans.append(plan) or launch(plan)
        self.engine = Engine(spec, self.device, config)
        self.outputs: dict[int, list[Output]] = {}

    def add(self, constraint: Constraint | None = None, salt: bytes = b"", count: int = ANSWER) -> int:
        prompt = np.array([len(self.outputs) + 1], np.int32)
        request = Request(prompt, SamplingParams(max_tokens=count, temperature=0.0), salt=salt)
        number = self.engine.add(request, constraint)
        self.outputs[number] = []
        return number

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.sequence].append(output)

    def tokens(self, number: int) -> list[int]:
        return [output.token for output in self.outputs[number] if output.token is not None]

    def finish(self, number: int) -> FinishReason | None:
        return self.outputs[number][-1].finish if self.outputs[number] else None

    def run(self) -> None:
        for _ in range(10_000):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def run_until_finished(self, *numbers: int) -> None:
        for _ in range(10_000):
            if all(self.finish(number) for number in numbers):
                return
            self.step()
        raise AssertionError("others wait for a mask")


def alone(count: int = ANSWER) -> list[int]:
    """Return the answer of the first row with a quick constraint, alone."""
    watched = Watched(1, 0)
    number = watched.add(HashedConstraint(0), count=count)
    watched.run()
    return watched.tokens(number)


def check_that_others_go_on(depth: int = 0, kind: type[RollingDevice] = RollingDevice, slow_from: int = 0) -> None:
    watched, constraint = Watched(4, depth, kind), HeldConstraint(0, slow_from)
    slow = watched.add(constraint)
    others = [watched.add(), watched.add(HashedConstraint(3)), watched.add()]
    watched.run_until_finished(*others)
    assert len(watched.tokens(slow)) == slow_from + 1
    assert watched.finish(slow) is None
    constraint.allow()
    watched.run()
    assert watched.tokens(slow) == alone()
    assert watched.finish(slow) is FinishReason.LENGTH


def check_tenants_take_turns_in_the_thread() -> None:
    watched, order = Watched(5, 0), list[int]()

    class Noted(HeldConstraint):
        def take(self, token: int) -> None:
            super().take(token)
            order.append(self.number)

    constraints = [Noted(number) for number in range(5)]
    for number, constraint in enumerate(constraints):
        constraint.number = number
        watched.add(constraint, b"modest" if number == 4 else b"greedy", count=3)
    watched.step()
    assert constraints[0].begun.acquire(timeout=SECONDS)
    for constraint in constraints:
        constraint.allow()
    watched.run()
    assert order[:2] == [0, 4], "a tenant with many slow masks goes before one with few"


class CostlyConstraint(HashedConstraint):
    """A constraint that is not known to be slow, and whose masks take a while all the same."""

    def __init__(self, state: int, cost: float) -> None:
        super().__init__(state)
        self.cost = cost
        self.here: list[int] = []
        self.thread = threading.get_ident()

    def take(self, token: int) -> None:
        super().take(token)
        self.seconds += self.cost
        self.here.append(threading.get_ident() == self.thread)


def check_the_bound_of_a_step(depth: int = 0, kind: type[RollingDevice] = RollingDevice) -> None:
    cost, rows = STEP_SECONDS / 3.5, 12
    watched = Watched(rows, depth, kind)
    constraints = [CostlyConstraint(number, cost) for number in range(rows)]
    numbers = [watched.add(constraint) for constraint in constraints]
    while not watched.engine.idle:
        before = sum(sum(constraint.here) for constraint in constraints)
        watched.step()
        here = sum(sum(constraint.here) for constraint in constraints) - before
        # One more may begin while there is time left.
        assert here * cost <= STEP_SECONDS + cost, f"{here} masks in one step"
    assert {len(watched.tokens(number)) for number in numbers} == {ANSWER}
    assert watched.tokens(numbers[0]) == alone()
    taken = [here for constraint in constraints for here in constraint.here]
    assert any(taken)
    assert not all(taken), "all masks were looked for between two steps"


class MoodyConstraint(HashedConstraint):
    """A constraint that is slow, or takes long, at random places."""

    def __init__(self, state: int, seed: int) -> None:
        super().__init__(state)
        self.random = Random(seed)
        self.slow = False

    def take(self, token: int) -> None:
        super().take(token)
        self.slow = self.random.random() < 0.3
        self.seconds += self.random.choice([0.0, 0.0, 0.03, 0.06])


class MoodyEngine(Engine):
    """Constrains the answers to some prompts, with constraints that are slow or not."""

    def __init__(self, *args, moody: bool, **more) -> None:
        super().__init__(*args, **more)
        self.moody = moody

    def add(self, request: Request, constraint: Constraint | None = None) -> int:
        if sum(request.prompt.tolist()) % 3:
            length = len(request.prompt)
            constraint = MoodyConstraint(length, length) if self.moody else HashedConstraint(length)
        return super().add(request, constraint)


def answers(workload: Workload, depth: int, moody: bool, drafts: bool) -> Run:
    config = replace(workload.config, depth=depth)
    drafting = Drafting(workload.spec.draft_room, costs=FreeDrafts()) if drafts else None
    return run_workload(replace(workload, config=config), partial(MoodyEngine, moody=moody, drafting=drafting))


def compare(seed: int, count: int = 6, **overrides: object) -> None:
    workload = drafted_workload(seed, count, **overrides)
    wanted = answers(workload, 0, moody=False, drafts=False)
    found = answers(workload, seed % 2, moody=True, drafts=False)
    for index, answer in wanted.answers.items():
        if FinishReason.ABORT in {wanted.finished[index], found.finished[index]}:
            length = min(len(answer), len(found.answers[index]))
            assert found.answers[index][:length] == answer[:length]
        else:
            assert (found.answers[index], found.finished[index]) == (answer, wanted.finished[index])
    assert not found.engine.ledger.leases
