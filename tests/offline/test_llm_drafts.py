"""Drafts through `LLM`: stop strings inside accepted drafts, streams, and options that are refused."""

from __future__ import annotations

import pytest

from tests.support.models.llm import make
from weft import SamplingParams
from weft.base.errors import OptionError
from weft.base.options import Options

LETTERS = tuple(range(ord("a"), ord("z") + 1))


def test_a_stop_string_inside_accepted_drafts_ends_the_answer_there() -> None:
    with make(draft="off") as plain, make() as drafted:
        whole = plain.generate("Hello", letters(60), use_tqdm=False)[0]
        for params in (letters(60), letters(60, stop=(whole.text[30:33],)), letters(60, stop_token_ids=(101,))):
            wanted = plain.generate("Hello", params, use_tqdm=False)[0]
            before = drafted.engine.planner.number
            # The second time, the answer is known from the first.
            for _ in range(2):
                found = drafted.generate("Hello", params, use_tqdm=False)[0]
                assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
                assert (found.finish_reason, found.logprobs) == (wanted.finish_reason, wanted.logprobs)
            assert drafted.engine.planner.number - before < 2 * len(wanted.token_ids)
            pieces = [chunk.text for chunk in drafted.stream("Hello", params)]
            assert "".join(pieces) == wanted.text
        assert drafted.engine.planner.drafting.counts.accepted.total() > 40


def letters(count: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, allowed_token_ids=LETTERS, ignore_eos=True, **more)


@pytest.mark.parametrize("draft", ["eagle", "dflash", "DSpark", ""])
def test_drafters_that_do_not_exist_are_refused_by_name(draft: str) -> None:
    with pytest.raises(OptionError, match="draft"):
        Options(draft=draft)
