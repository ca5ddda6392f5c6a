"""Rows of a grammar with drafts: the same answers in fewer steps, whatever is forced, guessed or refused."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.drafting.drafts_of_grammars import (
    FAMILY,
    GRAMMARS,
    answer,
    check_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps,
    grammars,
)
from tests.support.models import tiny_model
from tests.support.models.engines import make_engine, model_of
from tests.support.models.tiny_model import no_time
from weft import builtin
from weft.base.grammar import Grammar
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.masks import MaskFinder
from weft.engine.sequence import Sequence
from weft.text import grammar as grammar_module
from weft.text.grammar import Grammars, Guide
from weft.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps(grammar: Grammar, depth: int) -> None:
    check_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps(grammar, depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_slow_masks_change_no_answer_with_drafts_or_without(grammar: Grammar, depth: int) -> None:
    """Masks take from nothing to longer than all of a step, at random, so that some are found beside the steps."""
    random, now = Random(f"{grammar.kind} {depth}"), [0.0]

    def clock() -> float:
        now[0] += random.choice([0.0] * 20 + [0.001, 0.01, 0.1])
        return now[0]

    made = Grammars(tiny_model.tokenizer(), model_of(FAMILY).vocab_size, clock)
    drafting = Drafting(7, costs=FreeDrafts())
    plain, drafted = make_engine(FAMILY, depth=depth), make_engine(FAMILY, drafting=drafting, depth=depth)
    late = [0]
    take = MaskFinder.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_module, "GRAMMAR_SECONDS", 1e6)
        patch.setattr(grammar_module, "TENANT_SECONDS", 1e6)

        def counted(self: MaskFinder, sequence: Sequence, token: int) -> bool:
            found = take(self, sequence, token)
            late[0] += not found
            return found

        patch.setattr(MaskFinder, "take", counted)
        for seed in (None, 1, 1, 2):
            wanted = answer(make_engine(FAMILY), grammar, seed)
            assert answer(plain, grammar, seed, made) == wanted
            assert answer(drafted, grammar, seed, made) == wanted
    assert late[0] > 0
    assert drafting.counts.accepted.total() > 0


def test_what_is_forced_is_what_the_library_forces() -> None:
    """A mask with one token says as much as the library's own tokens of what must come next, and costs nothing."""
    words = load_tokenizer(Path(builtin.place_of(None)))
    assert words is not None
    compile_grammar, random = Grammars(words, words.size, no_time), Random(1)
    for _ in range(6):
        guide = compile_grammar(GRAMMARS[0], frozenset({0}))
        for _ in range(60):
            assert forced(guide) == guide._matcher.deep_copy().compute_ff_tokens()
            if guide.ended:
                break
            guide.take(random.choice(allowed(guide.mask)))


def test_looking_ahead_leaves_a_grammar_where_it_is() -> None:
    guide = grammars()(Grammar("regex", "abc[0-9]d"), frozenset())
    before = guide.mask.copy()
    assert forced(guide) == list(b"abc")
    assert len(guide.masks_along(list(b"abc5d"))) == 5
    assert len(guide.masks_along(list(b"abx"))) == 2
    assert guide.masks_along(list(b"x")) == []
    assert (guide.mask == before).all()
    for token in b"abc7":
        guide.take(token)
    assert forced(guide) == list(b"d")


def test_looking_ahead_stops_where_masks_become_slow() -> None:
    seconds = [0.0]

    class SlowLook(Guide):
        def _look(self) -> np.ndarray:
            seconds[0] += 0.004
            return super()._look()

    matcher = grammars().compile(Grammar("regex", "[a-z]{40}")).deep_copy()
    budgets = (grammar_module.MaskBudget(1.0),)
    guide = SlowLook(matcher, 256, frozenset(), "regex", lambda: None, budgets, lambda: seconds[0])
    began = seconds[0]
    masks = guide.masks_along(list(b"abcdefghijklmno"))
    assert len(masks) == 2
    assert seconds[0] - began <= grammar_module.LOOK_AHEAD_SECONDS
    # What the planner found, the step gets: the same masks, without looking again.
    assert all(a is b for a, b in zip(guide.masks_along(list(b"ab")), masks, strict=True))
    assert seconds[0] - began <= grammar_module.LOOK_AHEAD_SECONDS
    seconds[0] += 1
    guide.take(ord("a"))
    assert guide.mask is masks[0], "a draft that is accepted is not looked at again"
    assert len(guide.masks_along(list(b"bcd"))) == 3, "a new position is looked at anew, except what is known of it"


@pytest.mark.parametrize("seed", range(8))
def test_a_grammar_is_where_it_would_be_without_having_looked_ahead(seed: int) -> None:
    """Tokens are taken as a step accepts them: a few drafts, then one that may differ from what was looked at."""
    random, compile_grammar = Random(seed), grammars()

    def after(tokens: list[int]) -> Guide:
        guide = compile_grammar(GRAMMARS[0], frozenset({0}))
        for token in tokens:
            guide.take(token)
        return guide

    looking, taken = after([]), []
    for _ in range(12):
        drafts: list[int] = []
        for _ in range(random.randrange(5)):
            drafts.append(random.choice(allowed(after(taken + drafts).mask)))
        looking.masks_along(drafts)
        for token in [*drafts[: random.randrange(len(drafts) + 1)], None]:
            token = random.choice(allowed(looking.mask)) if token is None else token
            looking.take(token)
            taken.append(token)
            plain = after(taken)
            assert (looking.ended, forced(looking)) == (plain.ended, forced(plain))
            assert np.array_equal(looking.mask, plain.mask)
            if plain.ended:
                return


def forced(guide: Guide) -> list[int]:
    ahead, found = guide.look_ahead(), []
    while (token := ahead.forced()) is not None and ahead.take(token):
        found.append(token)
    return found


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_grammar_whose_own_masks_are_slow_is_not_looked_ahead_of() -> None:
    clock = iter(range(1000))
    made = Grammars(tiny_model.tokenizer(), 256, lambda: float(next(clock)))
    guide = made(Grammar("regex", "[a-z]{40}"), frozenset())
    guide.take(ord("a"))
    assert guide.masks_along(list(b"bcd")) == []
