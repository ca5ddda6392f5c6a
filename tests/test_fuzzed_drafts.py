"""Fuzzed requests answer with drafts as without: all families, parameters, drafters, both depths, little memory."""

from __future__ import annotations

import os

import pytest

from tests.draft_fuzz import DRAFTERS, WITH_HEAD, fuzz
from tests.engines import FAMILIES

# Window layers, experts, all kinds of recurrent layers, and heads.
QUICK = ["qwen3_5", "gemma3", "nemotron_h", "lfm2", "falcon_h1"]
REQUESTS = int(os.environ.get("WEFT_DRAFT_REQUESTS", "5000"))


def test_a_hundred_fuzzed_requests_answer_with_drafts_as_without() -> None:
    # Five rounds that have all drafters, and no long answers.
    counts = fuzz(QUICK, 100, first=4)
    assert all(counts[f"drafts by {name}"] > 10 for name in (*DRAFTERS, "grammar", "mtp"))
    assert counts["accepted"] > 50
    assert counts["decided by rounding"] <= 1


def test_fuzzed_requests_have_equal_bits_with_drafts_in_exact_mode() -> None:
    assert fuzz(["qwen3_5"], 20, exact=True)["accepted"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_many_fuzzed_requests_answer_with_drafts_as_without(family: str, exact: bool) -> None:
    """`WEFT_DRAFT_REQUESTS` is how many of each family; `pytest -s` shows what they met."""
    counts = fuzz([family], REQUESTS, exact)
    print(f"\n{family}{' exact' if exact else ''}: {dict(sorted(counts.items()))}")
    assert counts["decided by rounding"] <= REQUESTS / 500
    if REQUESTS >= 1000:
        drafters = [*DRAFTERS, "grammar", *(["mtp"] if family in WITH_HEAD else [])]
        missing = [name for name in drafters if not counts[f"drafts by {name}"]]
        assert not missing
