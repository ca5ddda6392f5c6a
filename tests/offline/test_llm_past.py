"""`LLM.fork` and `LLM.retain`: answers go on from any token, and prompts stay. Tiny hybrid models."""

from __future__ import annotations

import pytest

from tests.support.models.llm import greedy, make
from weft import LLM, RequestError, SamplingParams

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3


@pytest.fixture(scope="module", params=[False, True], ids=["usual", "exact"])
def llm(request: pytest.FixtureRequest):
    with make(exact=request.param) as llm:
        yield llm


def test_a_fork_goes_on_as_the_answer_did(llm: LLM) -> None:
    [whole] = llm.generate(LONG, greedy(max_tokens=90), use_tqdm=False)
    for at in (0, 1, 63, 80):
        first, *others = llm.fork(whole, at, 3, greedy(max_tokens=10))
        assert first.token_ids[: 90 - at] == whole.token_ids[at : at + 10]
        assert [each.token_ids for each in others] == 2 * [first.token_ids]
        assert first.prompt_token_ids == whole.prompt_token_ids + whole.token_ids[:at]
        assert all(len(first.prompt_token_ids) - each.cached_tokens <= 64 for each in others)


def test_a_fork_can_be_forked(llm: LLM) -> None:
    [whole] = llm.generate(LONG, greedy(max_tokens=40), use_tqdm=False, cache_salt="mine")
    [once] = llm.fork(whole, 10, sampling_params=greedy(max_tokens=20))
    [twice] = llm.fork(once, 5, sampling_params=greedy(max_tokens=20))
    assert twice.token_ids == whole.token_ids[15:35]
    assert twice.forked_tokens == 15
    assert twice.cached_tokens


def test_each_fork_may_have_parameters_of_its_own(llm: LLM) -> None:
    [whole] = llm.generate(LONG, greedy(max_tokens=8), use_tqdm=False)
    hot = SamplingParams(temperature=2.0, seed=5, max_tokens=8, ignore_eos=True)
    found = llm.fork(whole, 4, sampling_params=[greedy(max_tokens=8), hot, hot])
    assert found[1].token_ids == found[2].token_ids != found[0].token_ids


def test_what_a_fork_cannot_be_is_refused(llm: LLM) -> None:
    [whole] = llm.generate(LONG, greedy(max_tokens=8), use_tqdm=False)
    with pytest.raises(RequestError, match="at must be from 0"):
        llm.fork(whole, 9)
    with pytest.raises(RequestError, match="choice must be from 0"):
        llm.fork(whole, 1, choice=1)


def test_a_retained_prompt_is_counted_until_it_is_released(llm: LLM) -> None:
    llm.retain(LONG, seconds=100)
    assert llm.engine.stats()["retained"]["tokens"] >= 64
    llm.retain(LONG, seconds=0)
    assert llm.engine.stats()["retained"]["tokens"] == 0
    with pytest.raises(RequestError, match="retain must be from 0"):
        llm.retain(LONG, seconds=-1)
