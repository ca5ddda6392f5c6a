"""A history that was edited resumes before the cut and nowhere behind it, and computes little more than what is new."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.rolling import VOCABULARY, RollingDevice, rolling_spec
from tests.support.hashed.workloads import Workload, random_workload, run_and_check
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.keys import PrefixIdentity

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "400")) // 24


def edited_workload(seed: int, count: int = 8) -> Workload:
    """Most prompts are earlier ones with a span in the middle removed, replaced or shortened."""
    random, workload = Random(f"edits {seed}"), random_workload(seed, count)
    arrivals = []
    for each in workload.arrivals:
        if arrivals and random.random() < 0.8:
            earlier = random.choice(arrivals).prompt
            first, end = sorted(random.randint(0, len(earlier)) for _ in range(2))
            new = [random.randrange(VOCABULARY) for _ in range(random.choice([0, 0, end - first, 1]))]
            prompt = (earlier[:first] + new + earlier[end:])[: len(each.prompt) + len(earlier)] or [1]
            each = replace(each, prompt=prompt[: workload.config.max_length - each.count] or [1], snapshots=())
        arrivals.append(each)
    return replace(workload, arrivals=arrivals)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(2, 10))
def test_edited_prompts_are_answered_like_new_ones(part: int, seed: int, count: int) -> None:
    run_and_check(edited_workload(seed_of(part, seed), count))


def test_a_planted_edit_that_keeps_a_cell_behind_the_cut_is_caught(monkeypatch) -> None:
    """A cell's key forgets what was before it."""
    original = PrefixIdentity.keys

    def keys(self, tokens, after=None, decoded_from=None):
        cells = [tokens[first : first + self.cell] for first in range(0, len(tokens) - self.cell + 1, self.cell)]
        return [key for cell in cells for key in original(self, cell)]

    monkeypatch.setattr(PrefixIdentity, "keys", keys)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check_seeds(100)


def check_seeds(count: int) -> None:
    for seed in range(count):
        run_and_check(edited_workload(seed))


class Agent:
    """Turns of a conversation whose template strips the reasoning of earlier answers."""

    def __init__(self, opens_reasoning: bool, **spec: object) -> None:
        self.random = Random(7)
        self.spec = rolling_spec(cell=64, **spec)
        config = EngineConfig(memory_bytes=1 << 22, max_length=30000, max_tokens_per_step=512)
        self.engine = Engine(self.spec, RollingDevice(self.spec, config.memory_bytes, 64), config)
        self.opening = [3, 5] + [8, 9] * opens_reasoning
        self.history = self.text(900)
        self.ends = [900]

    def text(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def turn(self) -> tuple[int, int]:
        """Return the tokens that are new in this turn's prompt, and those that were computed for it."""
        before = len(self.history)
        said = self.text(self.random.randint(20, 200))
        self.history += said
        self.ends.append(len(self.history))
        prompt = self.history + self.opening
        params = SamplingParams(max_tokens=self.random.randint(200, 500), temperature=0.0)
        request = Request(np.array(prompt, np.int32), params, boundaries=(*self.ends[:8], *self.ends[-8:]))
        number, answer = self.engine.add(request), []
        while not self.engine.idle:
            answer += [output.token for output in self.engine.step() if output.token is not None]
        cached = self.engine.report(number).cached_tokens
        # Only the end of the answer is not reasoning, and the answer's role comes before it.
        kept = [3, 5, *answer[-self.random.randint(30, 150) :]]
        self.history += kept
        self.ends.append(len(self.history))
        self.new = len(self.history) - before
        return len(prompt), cached


@pytest.mark.parametrize("opens_reasoning", [False, True])
@pytest.mark.parametrize("kind", [{"recurrent": True}, {"heavy": True}, {"window": 100}, {"recurrent": False}], ids=str)
def test_ten_turns_with_stripped_reasoning_compute_little_more_than_what_is_new(
    kind: dict, opens_reasoning: bool
) -> None:
    agent = Agent(opens_reasoning, **kind)
    known = 0
    for turn in range(10):
        prompt, cached = agent.turn()
        # What the last turn's prompt did not have: its answer without reasoning, and this message.
        new = prompt - known
        if turn >= 2:
            assert prompt - cached <= new + 128
        known = prompt
