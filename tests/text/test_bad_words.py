"""Words that an answer must not contain: as tokens, as matches at the end of an answer, and on a seat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import tiny_model
from tests.support.models.engines import Ask, greedy, make_engine, serve, tokens
from weft import builtin
from weft.base.errors import InvalidField
from weft.base.plan import BANNED, Sampling
from weft.base.sampling import MAX_BAD_TOKENS, SamplingParams
from weft.engine.bad_words import BadWords
from weft.engine.request import Request
from weft.engine.seat_sampling import SeatSampling
from weft.engine.sequence import Sequence
from weft.memory.keys import PrefixIdentity
from weft.text.bad_words import token_sequences
from weft.text.tokenizer import load_tokenizer

SMALL = load_tokenizer(Path(builtin.place_of(None)))
TOKENS = st.integers(0, 3)


def test_a_word_is_banned_at_the_start_of_a_text_and_after_a_space():
    alone, spaced = (tuple(SMALL.encode(text, special=False)) for text in ("house", " house"))
    assert alone != spaced
    assert token_sequences(["house"], SMALL) == (alone, spaced)
    # A space that is given does not count twice.
    assert token_sequences([" house"], SMALL) == (spaced,)
    assert token_sequences([[5, 6], "a"], tiny_model.tokenizer()) == ((5, 6), (97,), (32, 97))
    with pytest.raises(InvalidField, match="bad_words has a text, but this model has no tokenizer"):
        token_sequences(["a"], None)


def banned(words: list[tuple[int, ...]], answer: list[int]) -> set[int]:
    """By definition."""
    return {token for token in range(4) for word in words if (*answer, token)[-len(word) :] == word}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6), st.lists(TOKENS, max_size=8), TOKENS)
def test_matches_are_those_of_the_definition_with_the_newest_token_known_or_not(words, answer, newest):
    found = BadWords(words)
    assert set(found.banned(answer)) == banned(words, answer)
    recent = answer[max(0, len(answer) - found.longest) :]
    after = {token for before, token in found.banned_after(recent) if before == newest}
    assert after | set(found.single) == banned(words, [*answer, newest])


def seated(sampling: SeatSampling, **params: object) -> Sampling:
    """What a request on seat 0 samples with, before its first token."""
    sequence = Sequence(0, Request(np.array([1, 2], np.int32), SamplingParams(**params)), 8, 0, PrefixIdentity(64))
    sampling.sit(sequence)
    return sampling.gather(np.zeros(1, np.int64), [sequence], np.zeros(1, np.int64), np.zeros(1, np.bool_))


def test_a_seat_keeps_nothing_of_the_request_before():
    sampling = SeatSampling(1)
    first = seated(sampling, bad_words=[[7], [8, 9]], allowed_token_ids=[3, 33])
    assert (first.bias_token.tolist(), first.bias_value.tolist()) == ([7], [np.float32(BANNED)])
    assert first.mask_bits.tolist() == [[8, 2]]
    assert not first.all_greedy
    second = seated(sampling, logit_bias={5: 1.0})
    assert (second.bias_token.tolist(), len(second.mask_row)) == ([5], 0)
    assert seated(sampling, temperature=0.0).all_greedy


def words_of(prompt: list[int], count: int) -> list[list[int]]:
    """Words of one, two and three tokens that a model answers with, each with the earlier ones banned."""
    words: list[list[int]] = []
    for place in range(count):
        engine = make_engine("lfm2", cache=False, max_sequences=1, paranoid=False)
        answer = serve(engine, [Ask(prompt, greedy(24, bad_words=words))])[0].tokens
        assert not any(answer[at : at + len(word)] == word for word in words for at in range(len(answer)))
        words.append(answer[place : place + 1 + place % 3])
    return words


@pytest.mark.parametrize("depth", [0, 1])
def test_banned_answers_are_the_same_alone_and_in_company_cached_and_preempted(depth):
    stem = tokens(130, 0)
    asks = [Ask(stem + tokens(n, n), greedy(24, bad_words=words_of(stem + tokens(n, n), 6))) for n in (5, 9)]
    # Rows without bad words next to them.
    asks += [Ask(stem, greedy(24)), Ask(stem[:70], greedy(24, allowed_token_ids=range(100)))]
    alone = [serve(make_engine("lfm2", cache=False, max_sequences=1, paranoid=False), [ask])[0].tokens for ask in asks]
    engine = make_engine("lfm2", depth=depth)
    step, preempted = engine.step, 0

    def stepping():
        nonlocal preempted
        if engine.planner.number % 4 == 3 and engine.planner.decoding:
            engine.planner.leave(engine.planner.decoding[0])
            preempted += 1
        return step()

    engine.step = stepping
    for _ in range(2):
        assert [answer.tokens for answer in serve(engine, asks)] == alone
    assert preempted > 5


def test_the_tokens_of_all_words_together_are_bounded():
    most = MAX_BAD_TOKENS // 512
    assert SamplingParams(bad_words=tuple((number, *[5] * 511) for number in range(most))).bad_words
    with pytest.raises(InvalidField, match=r"bad_words has \d+ tokens in all; the limit is 4096"):
        SamplingParams(bad_words=tuple((number, *[5] * 511) for number in range(most + 1)))
