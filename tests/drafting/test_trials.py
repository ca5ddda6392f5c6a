"""Drafts from earlier text are tried with few drafts: a cold engine loses little on prose, and edits gain soon.

Time passes only by steps, as many tokens as they compute or hardly any, so what is counted is the same on any machine.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import Drafting, SequenceDrafts
from weft.drafting.policy.suffix import Match, SharedTexts
from weft.engine.loop import Engine
from weft.engine.request import Request

SPEC = rolling_spec(cell=64, room=15)


class TextDevice(RollingDevice):
    """Answers with given texts, by the first token of the prompt. A step lasts a unit, and `each` for every token."""

    def __init__(self, answers: dict[int, tuple[int, list[int]]], each: float) -> None:
        super().__init__(SPEC, 1 << 20, len(answers), lazy=True)
        self.answers = answers
        self.each = each
        self.now = 0.0
        self.steps = 0
        self.names: dict[int, int] = {}

    def execute(self, plan: Plan) -> Landing:
        first = np.cumsum(plan.end - plan.start) - (plan.end - plan.start)
        self.names |= {int(plan.seat[row]): int(plan.tokens[first[row]]) for row in np.flatnonzero(plan.start == 0)}
        self.now += 1 + self.each * len(plan.tokens)
        self.steps += 1
        plan = self.placed(plan)
        rows, ends = self.samples_of(plan)
        found = []
        for row, end in zip(rows, ends, strict=True):
            prompt, answer = self.answers[self.names[int(plan.seat[row])]]
            found.append(answer[min(end - prompt, len(answer) - 1)])
        self.leave_on_board(plan, self._tokens(plan), found)
        return Landing(np.array(found, np.int32), None, None)


def answered(texts: list[tuple[list[int], list[int]]], each: float, depth: int, drafts: Drafting | None) -> TextDevice:
    """Answer all prompts together, in a new engine, and return its device."""
    device = TextDevice({prompt[0]: (len(prompt), answer) for prompt, answer in texts}, each)
    config = EngineConfig(memory_bytes=1 << 20, max_sequences=len(texts), max_length=2048, depth=depth)
    engine = Engine(SPEC, device, config, drafting=drafts, now=lambda: device.now)
    wanted = {}
    for prompt, answer in texts:
        params = SamplingParams(max_tokens=len(answer), temperature=0)
        wanted[engine.add(Request(np.array(prompt, np.int32), params))] = answer
    found: dict[int, list[int]] = {number: [] for number in wanted}
    while not engine.idle:
        for output in engine.step():
            found[output.sequence].append(output.token)
    assert found == wanted
    return device


def prose(rows: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Texts of few words, in which three words in a row come again and again, and are followed by any other."""
    random = Random(7)
    return [([100 + row], [random.randrange(12) for _ in range(tokens)]) for row in range(rows)]


def edited(tokens: int = 200, first: int = 1000) -> list[tuple[list[int], list[int]]]:
    """A text of all different words, and an answer that repeats it with every fortieth changed."""
    text = [first + place for place in range(tokens)]
    return [([*text, 1, 2, 3, *text[:3]], [900 if place % 40 == 39 else t for place, t in enumerate(text)][3:])]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rows", [1, 8])
def test_prose_of_a_cold_engine_computes_one_percent_more_where_a_draft_costs_as_much_as_a_token(
    rows: int, depth: int
) -> None:
    texts = prose(rows, 600)
    plain = answered(texts, 1.0, depth, drafts=None)
    drafted = answered(texts, 1.0, depth, drafts=Drafting(15))
    assert plain.computed_tokens < drafted.computed_tokens <= 1.01 * plain.computed_tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_an_edit_takes_a_third_of_the_steps_in_a_cold_engine_where_drafts_cost_little(depth: int) -> None:
    plain = answered(edited(), 0.01, depth, drafts=None)
    drafted = answered(edited(), 0.01, depth, drafts=Drafting(15))
    assert drafted.steps < plain.steps / 3.2


@pytest.mark.parametrize("depth", [0, 1])
def test_a_look_before_a_question_changes_no_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that find something, rarely, among others that repeat a text."""
    random = Random(9)
    rare = [([200 + row], [random.randrange(60) for _ in range(300)]) for row in range(3)]
    texts = [*prose(2, 200), *rare, *edited()]
    looking = answered(texts, 0.1, depth, drafts=Drafting(15))
    looks = []
    original = SequenceDrafts.may_draft
    monkeypatch.setattr(SequenceDrafts, "may_draft", lambda *args: looks.append(original(*args)) or True)
    asking = answered(texts, 0.1, depth, drafts=Drafting(15))
    assert (looking.steps, looking.computed_tokens) == (asking.steps, asking.computed_tokens)
    assert min(looks.count(True), looks.count(False)) > 20


class WrongDrafts(SequenceDrafts):
    """Proposes drafts in every step, none of which is right."""

    def find_drafts(self, answer, most, shared, ahead=0):
        count = min(most, self.most) + ahead
        return self._drafts_of("suffix", "suffix", Match(3, (99,) * count)) if most > 0 else None


class WrongDrafting(Drafting):
    def begin(self, prompt, salt, most, prediction, grammar=None):
        return WrongDrafts(prompt, salt, self.most, suffixes=False, overall=self.overall)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("each", [1 / 16, 1.0])
def test_wrong_drafts_of_many_rows_cost_two_percent_of_the_first_steps_where_every_token_costs(
    each: float, depth: int
) -> None:
    """Unlike `prose`, every row has drafts from the first step on. A step takes one unit, and `each` for a token."""
    for tokens in (50, 100):
        texts = prose(16, tokens)
        plain = answered(texts, each, depth, drafts=None)
        drafted = answered(texts, each, depth, drafts=WrongDrafting(15))
        assert plain.computed_tokens < drafted.computed_tokens
        assert plain.now > 0.98 * drafted.now


class FixedDrafting(Drafting):
    """Verifies the same number of drafts in every row, whatever they cost."""

    def choose(self, proposals, rows, most):
        return [len(proposal.worth) for proposal in proposals]


@pytest.mark.parametrize(("rows", "each", "share"), [(1, 1 / 16, 0.95), (1, 1.0, 0.95), (16, 1 / 16, 0.9)])
def test_right_drafts_of_a_cold_engine_are_nearly_as_fast_as_the_best_fixed_number(
    rows: int, each: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for row in range(rows) for text in edited(300, 1000 * (1 + row))]
    plain = answered(texts, each, 0, drafts=None)
    chosen = answered(texts, each, 0, drafts=Drafting(15))
    fixed = []
    with monkeypatch.context() as patch:
        patch.setattr(SequenceDrafts, "bound", lambda self, proposal: proposal)
        fixed = [answered(texts, each, 0, FixedDrafting(most)).now for most in (3, 7, 15)]
    assert min(fixed) < plain.now
    assert chosen.now < min(fixed) / share


def test_trials_begin_with_one_draft_and_double_while_all_are_right() -> None:
    # The last three tokens occurred before, and no more of them.
    text = [*range(50, 70), 1, 2, 3, *range(10, 40), 9, 1, 2, 3]
    drafts, sizes = SequenceDrafts(np.array(text, np.int32), b"", 15), []
    for accepted in (True, True, True, False, True):
        proposal = drafts.find_drafts([], 15, SharedTexts())
        tried = drafts.bound(proposal)
        assert tried.tokens == proposal.tokens[: len(tried.tokens)]
        sizes.append(len(tried.tokens))
        drafts.verified(tried, len(tried.tokens) if accepted else 0)
    assert sizes == [1, 2, 4, 8, 1]
