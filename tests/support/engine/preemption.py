"""Scores and penalties of answers that are preempted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.support.models.engines import Answer, Ask, greedy, make_engine, seeded, serve, tokens
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.engine.sequence import Sequence

FAMILIES = ("lfm2", "qwen3_5", "falcon_h1", "gemma3", "llama")
TOLERANCE = 1e-5
STEM = tokens(100, 0)
# Strong enough that forgetting a few tokens of the answer changes the next one.
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2}


@cache
def asks() -> tuple[Ask, ...]:
    """Scores begin at the prompt's start, on the grid and off it; some requests are penalised, one is scored too."""
    return (
        Ask(STEM + tokens(90, 1), greedy(12, prompt_logprobs=2)),
        Ask(STEM[:70] + tokens(110, 2), seeded(16, seed=3, prompt_logprobs=0, prompt_logprobs_start=64)),
        Ask(tokens(60, 3), greedy(30, prompt_logprobs=1, prompt_logprobs_start=9, **PENALTIES), step=2),
        Ask(STEM[:40], greedy(40, **PENALTIES), step=3),
        Ask(tokens(200, 4), replace(greedy(1, prompt_logprobs=1), max_tokens=0), step=3),
    )


@cache
def alone(family: str) -> list[Answer]:
    """Each request by itself, in one piece, without a cache."""
    return [
        serve(make_engine(family, cache=False, max_sequences=1, paranoid=False), [replace(ask, step=0)])[0]
        for ask in asks()
    ]


def preempt(engine: Engine) -> set[str]:
    """Preempt every sequence each time that it has accumulated something new; what, filled while the engine runs."""
    planner, step = engine.planner, engine.step
    seen: set[tuple[int, str]] = set()
    kinds: set[str] = set()

    def stepping() -> list[Output]:
        for sequence in (*planner.prefilling, *planner.decoding):
            found = {(sequence.id, kind) for kind in accumulated(sequence)}
            if not found <= seen:
                planner.leave(sequence)
                # With an empty cache it has nothing to resume from.
                if len(seen) % 2:
                    engine.flush()
                seen.update(found)
                kinds.update(kind for _, kind in found)
                break
        return step()

    engine.step = stepping
    return kinds


def accumulated(sequence: Sequence) -> set[str]:
    params, scores = sequence.request.params, len(sequence.report.prompt_scores)
    found = set()
    if scores:
        is_complete = params.prompt_logprobs_start + scores == len(sequence.request.prompt) - 1
        found.add("all scores" if is_complete else "some scores")
    if params.presence_penalty and len(sequence.generated) >= 6:
        found.add("6 penalised tokens" if len(sequence.generated) < 20 else "20 penalised tokens")
    return found


def check_scores_and_penalties_do_not_depend_on_preemptions(family: str, depth: int) -> None:
    engine = make_engine(family, depth=depth, max_tokens_per_step=64)
    kinds = preempt(engine)
    answers = serve(engine, list(asks()))
    assert kinds == {"all scores", "some scores", "6 penalised tokens", "20 penalised tokens"}
    for number, (answer, expected) in enumerate(zip(answers, alone(family), strict=True)):
        assert answer.tokens == expected.tokens, f"request {number}"
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE), f"request {number}"
        assert_same_scores(answer, expected, f"request {number}")


def assert_same_scores(answer: Answer, expected: Answer, what: str) -> None:
    scores, wanted = answer.report.prompt_scores, expected.report.prompt_scores
    assert len(scores) == len(wanted), what
    for place, (score, one) in enumerate(zip(scores, wanted, strict=True)):
        assert score.logprob == pytest.approx(one.logprob, abs=TOLERANCE), f"score {place} of {what}"
        assert [token for token, _ in score.top] == [token for token, _ in one.top], f"score {place} of {what}"
