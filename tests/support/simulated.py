"""Workloads that a simulated and a real engine answer."""

from __future__ import annotations

from random import Random

import numpy as np

from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.simulate.costs import CostModel
from weft.simulate.text import SimulatedRequest, Text, simulated_request, tokens


def cost_of(spec) -> CostModel:
    return CostModel(spec, 1e8, 1e8, 256)


def waves(seed: int) -> list[list[tuple[int, ...]]]:
    """A small workload in waves: each request is (conversation, branch of it, new tokens, answer)."""
    random = Random(seed)
    return [
        [(random.randrange(4), random.randrange(2), random.randint(5, 150), random.randint(1, 70)) for _ in range(3)]
        for _ in range(10)
    ]


def conversations(plan) -> list[list[SimulatedRequest]]:
    """The waves as requests; a conversation goes on from its last answer, or from its beginning on another branch."""
    texts: dict[int, Text] = {}
    number, found = 100, []
    for wave in plan:
        asks = []
        for conversation, branch, new, answer in wave:
            known = texts.get(conversation) if branch else None
            text = known.fork() if known else Text(64, [(1, 70 + 40 * conversation), (2 + conversation, 64)])
            if text.length > 400:
                text = Text(64, [(1, 150)])
            text.append(number, new)
            asks.append((conversation, simulated_request(text, number + 1, answer), text))
            number += 2
        for conversation, _, text in asks:
            texts[conversation] = text
        found.append([each for _, each, _ in asks])
    return found


def on_engine(engine: Engine, plan: list[list[SimulatedRequest]]) -> list[int]:
    """Hit tokens of every request, in order. Answers are what the model says, and prompts quote them."""
    said: dict[int, np.ndarray] = {}
    hits = []
    for wave in plan:
        numbers = {}
        for each in wave:
            parts = [said[n][:c] if n in said else tokens([(n, c)], 256) for n, c in each.stretches]
            params = SamplingParams(max_tokens=each.answer, temperature=1.0, seed=1, ignore_eos=True)
            request = Request(np.concatenate(parts), params, boundaries=each.boundaries)
            numbers[engine.add(request)] = each
        generated = {number: [] for number in numbers}
        while not engine.idle:
            for output in engine.step():
                if output.token is not None:
                    generated[output.sequence].append(output.token)
        for number, each in numbers.items():
            hits.append(engine.report(number).cached_tokens)
            answer = max(said, default=0)
            said[answers_of(each)] = np.array(generated[number], np.int32)
            assert answer is not None
    return hits


def answers_of(each: SimulatedRequest) -> int:
    """The number of the stretch that will hold the answer: the one after the last message's."""
    return each.stretches[-1][0] + 1
