"""Drafts by a script: right or wrong at random, for engines on any device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import numpy as np

from tests.support.hashed.rolling import POISON, VOCABULARY, RollingDevice, oracle, rolling_spec
from tests.support.hashed.workloads import Workload, check_answers, random_workload, run_workload, tight_memory
from weft.base.config import EngineConfig
from weft.base.plan import Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.policy.suffix import SharedTexts
from weft.engine.loop import Engine
from weft.engine.request import Request


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
