"""Drafts change no answer: random acceptance on the rolling-hash device, with everything else that can happen to a row.

Scripted drafts continue the oracle's answer and are wrong at random places, so rows are settled anywhere: inside a
cell, at its border and beyond it, while other rows are a flight ahead, memory is short, and requests are aborted
between launch and landing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rolling import VOCABULARY
from tests.test_properties import parts, thorough
from tests.workloads import Workload, check_answers, random_workload, run_workload, tight_memory
from weft.engine.loop import Engine
from weft.speculate.costs import FreeDrafts
from weft.speculate.drafting import Drafting, Proposal, SequenceDrafts
from weft.speculate.suffix import SharedTexts

EXAMPLES = 240


class Script(SequenceDrafts):
    """Drafts of one sequence from the answer that is known in advance, each wrong with some probability."""

    def __init__(self, random: Random, prompt: np.ndarray, answer: list[int], most: int) -> None:
        super().__init__(prompt, b"", most)
        self.random = random
        self.answer = answer
        self.wrong = random.choice([0.0, 0.1, 0.3, 1.0])

    def propose(self, answer: list[int], most: int, shared: SharedTexts) -> Proposal | None:
        count = self.random.randint(0, min(most, self.most)) if most > 0 else 0
        tokens = (self.answer[len(answer) :] + [0] * count)[:count]
        tokens = [(t + 1) % VOCABULARY if self.random.random() < self.wrong else t for t in tokens]
        return Proposal("scripted", "scripted", tuple(tokens), 0.99) if tokens else None


class ScriptedDrafting(Drafting):
    """Drafts from the answers to all prompts."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], most: int, seed: int) -> None:
        super().__init__(most, costs=FreeDrafts())
        self.random = Random(f"drafts {seed}")
        self.answers = answers

    def begin(self, prompt, salt, most, prediction):
        return Script(self.random, prompt, self.answers[tuple(prompt.tolist())], self.most)


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
    check_answers(workload, run_workload(workload, partial(Engine, drafting=drafting)))
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
