"""A run may choose other experts only at a near-tie, and only with the logits of that choice. All else is an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.draft_fuzz import LONGEST, MEMORY, Told, Wish, answer_all, compare, engine_of, subject
from tests.support.models.near_ties import NearTies
from weft.base.sampling import SamplingParams
from weft.kernels.choosing import Table
from weft.kernels.experts import Routing
from weft.kernels.interface import DecodeSteps

FAMILY = "lfm2_moe"
# At the third token of the answer, the scores of experts 2 and 6 differ by 3e-7. An x86 machine chose one of them in a
# step with drafts and the other one in a step without.
ASKED = Wish(
    [144, 36, 249, 186, 43, 115, 51, 48, 224],
    SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, repetition_penalty=1.3),
)
TEXT = [*ASKED.prompt, 248, 62, 112]
PLACE = 3  # of the first token that depends on the tie


@cache
def ties() -> NearTies:
    found = subject(FAMILY, False, False)
    operations = engine_of(found, False, MEMORY)._device.operations
    return NearTies(found.model, found.memories, operations, MEMORY, LONGEST)


def answer(expert: int = 0, by: float = 0.0, prompt: list[int] = ASKED.prompt) -> Told:
    """Answer with one expert's logits moved at every token."""

    def moved(logits: Tensor, *others: Any, **more: Any) -> Routing:
        shift = torch.zeros(logits.shape[1])
        shift[expert] = by
        routing: Routing = ties().operations.route_sigmoid(logits + shift, *others, **more)
        return routing

    # Recorded steps would not come by here.
    table = Table({**vars(ties().operations), "route_sigmoid": moved, "record_decodes": DecodeSteps})
    engine = engine_of(replace(subject(FAMILY, False, False), operations=table), False, MEMORY)
    return answer_all(engine, [replace(ASKED, prompt=prompt)])[0]


def both_answers() -> tuple[Told, Told]:
    """Return the answers of runs that decide the tie in one way and the other."""
    (tie,) = ties().compute(TEXT).ties
    return answer(tie.expert, -1e-5), answer(tie.expert, 1e-5)


def test_a_near_tie_is_found_and_decided_in_both_ways() -> None:
    one, other = ties().decisions(TEXT)
    assert [tie.place for tie in one.ties] == [(0, len(TEXT) - 1)]
    assert (one.logits - other.logits).abs().max() > 0.9
    assert ties().compute(TEXT[:-1]).ties == []


def test_runs_that_decide_a_tie_in_different_ways_are_both_right() -> None:
    counts: Counter[str] = Counter()
    plain, drafted = both_answers()
    compare(ASKED, plain, drafted, False, counts, ties())
    assert counts["experts decided by rounding"] == 1
    with pytest.raises(AssertionError, match="the logits of token 3 differ by"):
        compare(ASKED, plain, drafted, False, counts)


@pytest.mark.parametrize("adjusted_only", [False, True], ids=["logits", "penalties"])
def test_what_is_wrong_besides_a_tie_is_caught(adjusted_only: bool) -> None:
    plain, drafted = both_answers()
    wrong = torch.zeros(len(drafted.choices[PLACE].logits))
    wrong[7] = 0.01
    choice = drafted.choices[PLACE]
    raw = choice.raw if adjusted_only else choice.raw + wrong
    drafted.choices[PLACE] = replace(choice, logits=choice.logits + wrong, raw=raw)
    with pytest.raises(AssertionError, match="the logits of token 3 differ by"):
        compare(ASKED, plain, drafted, False, Counter(), ties())


def test_wrong_memory_and_wrong_experts_are_caught() -> None:
    one_token_differs = answer(prompt=[145, *ASKED.prompt[1:]])
    other_experts = answer(expert=6, by=0.3)
    for wrong in (one_token_differs, other_experts):
        with pytest.raises(AssertionError, match="the logits of token 0 differ by"):
            compare(ASKED, answer(), wrong, False, Counter(), ties())


def test_scores_of_prompts_may_differ_by_a_tie_too() -> None:
    prompt = [*TEXT, 100]
    one, other = (computed.scores for computed in ties().decisions(prompt))
    assert one != pytest.approx(other, abs=0.01)
    asked, counts = replace(ASKED, prompt=prompt), Counter[str]()
    compare(asked, Told(scores=one), Told(scores=other), False, counts, ties())
    assert counts["experts decided by rounding"] == 1
    with pytest.raises(AssertionError):
        compare(asked, Told(scores=one), Told(scores=[*other[:-1], other[-1] + 0.01]), False, counts, ties())
