"""Masks of several answers are found together, by several threads. They are those that each answer finds alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.gpu import fresh
from tests import tiny_model
from tests.test_grammar import GRAMMARS, SCHEMA, allowed, merged_tokenizer
from weft import LLM, SamplingParams
from weft.base.errors import InvalidField
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.text import grammar, guide
from weft.text.grammar import Grammars
from weft.text.guide import Guide

STOPS = frozenset([merged_tokenizer().special_token("<|end|>") or 0])


def grammars(threads: int = 2) -> Grammars:
    return Grammars(merged_tokenizer(), merged_tokenizer().size, threads)


def take_both(together: Guide, alone: Guide, token: int) -> None:
    """Let an answer and its twin take a token; both fail or none does."""
    errors = []
    for each in (together, alone):
        try:
            each.take(token)
            errors.append("")
        except InvalidField as error:
            errors.append(str(error))
    assert errors[0] == errors[1]
    if not errors[0]:
        assert together.ended == alone.ended
        assert together.mask.tolist() == alone.mask.tolist()


def walk_together(seed: int, answers: int = 9, steps: int = 24) -> int:
    """Advance answers by random tokens, and twins of them alone; return how often a mask was found with others."""
    random, compiled, found = Random(seed), grammars(), 0
    rows = []
    for _ in range(answers):
        kind = random.choice(GRAMMARS)
        rows.append((compiled(kind, STOPS), compiled(kind, STOPS)))
    for _ in range(steps):
        rows = [row for row in rows if not row[0].ended]
        tokens = []
        for together, _ in rows:
            if random.random() < 0.2:
                # Drafts, which may be what follows.
                together.masks_along([random.choice(allowed(together))])
            wrong = random.random() < 0.02
            tokens.append(random.randrange(merged_tokenizer().size) if wrong else random.choice(allowed(together)))
        asked = [(row[0], token) for row, token in zip(rows, tokens, strict=True) if random.random() < 0.8]
        for each, _ in asked:
            # A machine may be slow.
            each._look_seconds = 0.0
        compiled.expect(asked)
        found += sum(each._found is not None for each, _ in asked)
        for (together, alone), token in zip(rows, tokens, strict=True):
            take_both(together, alone, token)
        rows = [row for row in rows if not row[0]._matcher.is_error()]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_masks_found_together_are_those_found_alone(seed: int) -> None:
    assert walk_together(seed) > 8


def test_a_mask_of_another_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = guide.fill_next_token_bitmask_par

    def turned(executor: object, matchers: list, found: np.ndarray) -> None:
        original(executor, matchers, found)
        found[:] = np.roll(found, 1, axis=0)

    monkeypatch.setattr(guide, "fill_next_token_bitmask_par", turned)
    with pytest.raises(AssertionError):
        walk_together(0)


def test_answers_that_take_long_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = grammars()
    guides = [compiled(SCHEMA, STOPS) for _ in range(grammar.FEWEST_TOGETHER)]

    def step() -> list[bool]:
        tokens = [allowed(each)[0] for each in guides]
        compiled.expect(list(zip(guides, tokens, strict=True)))
        joined = [each._found is not None for each in guides]
        for each, token in zip(guides, tokens, strict=True):
            each._seconds_left = 10.0
            each.take(token)
        return joined

    # One that was slow alone does not take part.
    for each in guides:
        each._look_seconds = 0.0
    guides[0]._look_seconds = guide.SLOW_SECONDS
    assert step() == [False, True, True, True]
    # If all together took longer than one may, it is not known which was slow: none takes part in the next step.
    for each in guides:
        each._look_seconds = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(guide, "TOKEN_SECONDS", -1.0)
        assert all(step())
    assert not any(step())


def test_an_engine_with_several_threads_gives_the_same_answers() -> None:
    with LLM(**tiny_model.OPTIONS, memory="64MiB", progress=False, threads=1, device="cpu") as llm:
        found = []
        for threads in (1, 2):
            before = fresh(llm)
            words = Grammars(tiny_model.tokenizer(), llm.vocab_size, threads)
            engine = Engine(before.ledger.spec, before._device, before.config, words)
            params = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
            for row in range(6):
                engine.add(Request(np.arange(5 + row, dtype=np.int32), params, grammar=SCHEMA))
            answers: dict[int, list[int]] = {}
            while not engine.idle:
                for output in engine.step():
                    assert output.error is None
                    answers.setdefault(output.sequence, []).append(output.token)
            found.append(list(answers.values()))
        assert found[0] == found[1]
        assert sum(map(len, found[0])) > 24
