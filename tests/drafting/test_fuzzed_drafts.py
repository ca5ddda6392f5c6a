"""Fuzzed requests answer with drafts as without: all families, parameters, drafters, both depths, little memory."""

from __future__ import annotations

import math
import os
from collections import Counter

import numpy as np
import pytest
import torch

from tests.support.models.draft_choices import Choice
from tests.support.models.draft_fuzz import DRAFTERS, WITH_HEAD, Told, Wish, compare, fuzz
from tests.support.models.engines import FAMILIES
from weft.base.sampling import SamplingParams
from weft.engine.events import Output
from weft.engine.seat_sampling import uniform

# Window layers, experts, all kinds of recurrent layers, and heads.
QUICK = ["qwen3_5", "gemma3", "nemotron_h", "lfm2", "falcon_h1"]
REQUESTS = int(os.environ.get("WEFT_DRAFT_REQUESTS", "5000"))


@pytest.mark.thorough
def test_a_hundred_fuzzed_requests_answer_with_drafts_as_without() -> None:
    # Five rounds that have all drafters, and no long answers.
    counts = fuzz(QUICK, 100, first=4)
    assert all(counts[f"drafts by {name}"] > 10 for name in (*DRAFTERS, "grammar", "mtp"))
    assert counts["accepted"] > 50
    assert counts["decided by rounding"] <= 1


def test_fuzzed_requests_have_equal_bits_with_drafts_in_exact_mode() -> None:
    assert fuzz(["qwen3_5"], 20, exact=True)["accepted"] > 10


def told(logits: list[float], token: int, number: float | None = None) -> Told:
    """An answer of one token, chosen from these logits."""
    found = torch.tensor(logits)
    return Told([Output(0, token, logprob=-1.0)], choices=[Choice(found, number, found)])


def test_a_token_may_differ_only_if_rounding_moves_a_border_past_its_random_number() -> None:
    number = float(uniform(np.array([5], np.uint64), np.array([0]))[0])
    asked = Wish([1], SamplingParams(max_tokens=1, temperature=1.0, seed=5))
    above, below = ([math.log(share), math.log(1 - share)] for share in (number + 1e-6, number - 1e-6))
    counts: Counter[str] = Counter()
    compare(asked, told(above, 0, number), told(below, 1, number), False, counts)
    assert counts["decided by rounding"] == 1
    with pytest.raises(AssertionError, match="is 1, not 0"):
        compare(asked, told(above, 0, number), told(above, 1, number), False, counts)
    with pytest.raises(AssertionError, match="differ by"):
        compare(asked, told(above, 0, number), told([above[0] - 0.01, above[1]], 1, number), False, counts)
    with pytest.raises(AssertionError, match="another random number"):
        compare(asked, told(above, 0, number), told(above, 1, number + 1e-3), False, counts)
    with pytest.raises(AssertionError, match="differ by"):
        compare(asked, told(above, 0, number), told(below, 1, number), True, counts)


def test_a_greedy_token_may_differ_only_if_rounding_closes_the_gap() -> None:
    asked = Wish([1], SamplingParams(max_tokens=1, temperature=0.0))
    counts: Counter[str] = Counter()
    compare(asked, told([1.0, 0.999995, -2.0], 0), told([0.999995, 1.0, -2.0], 1), False, counts)
    assert counts["decided by rounding"] == 1
    with pytest.raises(AssertionError, match="is 1, not 0"):
        compare(asked, told([1.0, 0.99, -2.0], 0), told([1.0, 0.99, -2.0], 1), False, counts)
    with pytest.raises(AssertionError, match="other tokens are banned"):
        compare(asked, told([1.0, 0.99, -2.0], 0), told([-math.inf, 0.99, -2.0], 1), False, counts)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_many_fuzzed_requests_answer_with_drafts_as_without(family: str, exact: bool) -> None:
    """`WEFT_DRAFT_REQUESTS` is how many of each family; `pytest -s` shows what they met."""
    counts = fuzz([family], REQUESTS, exact)
    print(f"\n{family}{' exact' if exact else ''}: {dict(sorted(counts.items()))}")
    # Each is shown to be rounding. Many would mean that it is more than that.
    assert counts["decided by rounding"] <= 2 + REQUESTS / 500
    assert counts["experts decided by rounding"] <= 2 + REQUESTS / 500
    if REQUESTS >= 1000:
        drafters = [*DRAFTERS, "grammar", *(["mtp"] if family in WITH_HEAD else [])]
        missing = [name for name in drafters if not counts[f"drafts by {name}"]]
        assert not missing
