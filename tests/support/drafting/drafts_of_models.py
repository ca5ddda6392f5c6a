"""Every sampling parameter on a tiny model, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.models.engines import (
    Answer,
    Ask,
    greedy,
    make_engine,
    seeded,
    serve,
    tokens,
)
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason

COUNT = 40
# Every other token that may come is a stop token, so an answer ends soon after it may.
STOPS: dict[str, Any] = {"allowed_token_ids": tuple(range(40, 64)), "stop_token_ids": tuple(range(40, 64, 2))}


def parameters(answers: list[list[int]]) -> list[SamplingParams]:
    """Parameters that depend on the answer so far, each so that it matters for the prompt with the given answer."""
    answer = answers[5]
    return [
        greedy(COUNT),
        seeded(COUNT, 11),
        seeded(COUNT, 12, top_k=9, top_p=0.9, repetition_penalty=1.3),
        seeded(COUNT, 13, presence_penalty=1.0, frequency_penalty=1.5, min_p=0.01),
        greedy(COUNT, frequency_penalty=2.0, repetition_penalty=1.1),
        greedy(COUNT, min_tokens=9, stop_token_ids=(answer[3], answer[12])),
        greedy(COUNT, bad_words=(tuple(answers[6][4:6]), tuple(answers[6][9:12]), (answers[6][20],))),
        greedy(COUNT, logit_bias={answers[7][0]: -100.0, 17: 2.0}),
        greedy(COUNT, allowed_token_ids=tuple(range(40, 90))),
        *(greedy(COUNT, min_tokens=least, **STOPS) for least in (4, 7, 10)),
        *(seeded(COUNT, least, min_tokens=least, **STOPS) for least in (5, 8, 11)),
    ]


def make_asks(family: str, seed: int) -> list[Ask]:
    # Answers start before a border of the grid and end after it.
    prompts = [tokens(21 + 7 * (n % 9), seed + n) for n in range(15)]
    answers = [found.tokens for found in serve(make_engine(family), [Ask(prompt, greedy(COUNT)) for prompt in prompts])]
    asks = [Ask(prompt, params, step=n // 3) for n, (prompt, params) in enumerate(zip(prompts, parameters(answers)))]
    return [*asks, Ask(tokens(300, seed), greedy(5), step=4)]


def drafted(family: str, asks: list[Ask], answers: list[Answer], seed: int, **settings: object) -> ScriptedDrafting:
    """Answer again with scripted drafts, compare, and return what was drafted."""
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    drafting = ScriptedDrafting(known, 1 + seed % 6, seed)
    again = serve(make_engine(family, drafting=drafting, **settings), asks)
    for one, other in zip(answers, again, strict=True):
        assert other.tokens == one.tokens
        assert other.finish == one.finish
        assert other.logprobs == pytest.approx(one.logprobs, abs=2e-4)
    return drafting


def check_every_parameter(family: str = "qwen3_5", depth: int = 0) -> None:
    asks = make_asks(family, seed=3)
    answers = serve(make_engine(family, depth=depth), asks)
    counts = drafted(family, asks, answers, seed=3, depth=depth, max_tokens_per_step=96).counts
    assert counts.accepted.total() > 20
    assert counts.proposed.total() - counts.accepted.total() > 20
    ends = [answer.finish for ask, answer in zip(asks, answers, strict=True) if ask.params.min_tokens]
    assert ends.count(FinishReason.STOP) >= 4, "stop tokens are rare, so that min_tokens decides little"
