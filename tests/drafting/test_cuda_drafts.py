"""Drafts with the runner and the kernels of a GPU: recorded sizes, and answers as without drafts."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.drafting.drafts_of_models import make_asks
from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.kernels.operations import PLAIN
from tests.support.kernels.plans import Row, make_plan
from tests.support.models.cuda_engines import for_each, held, load_tiny, make
from tests.support.models.draft_choices import check_inputs, watch
from tests.support.models.engines import FAMILIES, Ask, dummy_model, greedy, seeded, serve, tokens
from tests.support.runner.cuda_runner import FEW_LAYERS, SPEC, cpu_engine, cuda_engine, prompt_inputs
from weft.base.config import EngineConfig
from weft.base.plan import Plan, StepDrafts
from weft.device.store import Store
from weft.engine.loop import Engine
from weft.runner.cuda import recorded
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.cuda.recorded import RecordedSteps, StepOutput, draft_sizes, prompt_sizes, step_sizes


def test_samples_of_drafts_lie_where_their_tokens_are_and_stay_off_the_board():
    rows = [
        Row(9, 10, read_slot=3, tail=1, seat=5, pages=[4, 7], window_pages=[11, 13]),
        Row(13, 17, read_slot=2, tail=4, seat=1, tokens=[1, 2, 3, 4], pages=[6, 8, 10], window_pages=[16, 17, 18]),
        Row(3, 5, tail=5, seat=2, tokens=[7, 8], pages=[15], window_pages=[20]),
    ]
    plan = replace(
        make_plan(rows), sampled=np.arange(3, dtype=np.int32), drafts=StepDrafts(np.array([0, 3, 1], np.int32))
    )
    inputs = prompt_inputs(Size(2, 4, 16, samples=17))
    inputs.fill(plan)
    # Behind a decode and its padding: the four tokens of the second row, then two of the third.
    assert inputs.step.answer.tolist()[:7] == [0, 2, 3, 4, 5, 6, 7]
    assert inputs.step.answer_seat.tolist() == [5] + [9] * 16


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256])
def test_every_number_of_rows_with_three_drafts_has_a_recorded_size(most):
    sizes = step_sizes(most, room=7)
    assert [size.all_tokens for size in sizes] == sorted(size.all_tokens for size in sizes)
    for rows in range(1, most + 1):
        assert any(size.holds(0, rows, 4 * rows, 4 * rows) for size in sizes)
        assert any(size.holds(rows // 2, rows - rows // 2, 4 * (rows - rows // 2), 3 * rows) for size in sizes)
    assert draft_sizes(most, room=0) == []
    assert not any(size.holds(0, 1, 4, 4) for size in prompt_sizes(most) if not size.decodes), "one sample a row"


@pytest.mark.parametrize(("most", "room"), [(1, 7), (2, 1), (3, 7), (130, 3), (256, 7)])
def test_every_recorded_size_holds_the_drafts_that_fill_it(most, room):
    spec, scratch = replace(SPEC, draft_room=room), Store(SPEC, 1 << 16, scratch=True).scratch
    for size in step_sizes(most, room, drafter=True):
        StepInputs(size, most, 4, spec, scratch, "cpu", PLAIN)
    for size in draft_sizes(most, room):
        inputs, rows = StepInputs(size, most, 4, spec, scratch, "cpu", PLAIN), size.longer - 1
        length = min(size.samples // rows, room + 1)
        assert size.holds(0, rows, rows * length, rows * length, length)
        row = Row(0, length, tokens=[0] * length, pages=[3], window_pages=[5])
        plan = make_plan([row._replace(seat=seat) for seat in range(rows)])
        sampled, drafts = np.arange(rows, dtype=np.int32), np.full(rows, length - 1, np.int32)
        inputs.fill(replace(plan, sampled=sampled, drafts=StepDrafts(drafts)))
        lengths, rest = inputs.step.batch.first.diff().tolist(), size.tokens - rows * length
        assert lengths == [length] * rows + [rest], "padding has the tokens that are left, if any"
        assert inputs.step.answer.tolist()[: rows * length] == list(range(rows * length))
    with pytest.raises(AssertionError, match="without a plan"):
        Size(0, 2, 2, longest=room + 1)


class NamedInputs:
    """Inputs of a size that only say which one was filled."""

    def __init__(self, size: Size, filled: list[Size]) -> None:
        self.size, self.filled, self.builds_on_flight = size, filled, size.samples is not None

    def fill(self, plan: Plan, lines: None) -> None:
        self.filled.append(self.size)


@pytest.mark.parametrize("most", [3, 40, 300])
def test_costs_are_those_of_the_size_that_runs(most, monkeypatch):
    filled: list[Size] = []
    tokens = torch.zeros(2048, dtype=torch.int32)
    monkeypatch.setattr(RecordedSteps, "_replay", lambda *_: StepOutput(None, tokens, tokens))
    inputs = [NamedInputs(size, filled) for size in step_sizes(most, room=7)]
    steps = RecordedSteps(None, (), None, SimpleNamespace(rows=most), inputs)
    largest, random = max(each.size.all_tokens for each in inputs), Random(most)
    for _ in range(200):
        rows = random.randint(1, most)
        drafting = random.choice([1, 2, rows // 3 + 1, rows])
        drafts = [0] * max(0, rows - drafting) + [random.randint(1, 7) for _ in range(min(rows, drafting))]
        plan = make_plan([Row(9, 10 + count, tokens=[0] * (1 + count), seat=0) for count in drafts])
        plan = replace(plan, sampled=np.arange(rows, dtype=np.int32), drafts=StepDrafts(np.array(drafts, np.int32)))
        filled.clear()
        padded = steps.padded_tokens(rows, sum(drafts))
        if steps.run(plan) is None:
            assert padded > largest + rows, "no recorded size has costs of what is not recorded"
        else:
            assert [size.all_tokens for size in filled] == [padded]


def answer_both(family: str, monkeypatch: pytest.MonkeyPatch, states: str = "float32", tolerance: float = 2e-4) -> None:
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (16,))
    monkeypatch.setattr(recorded, "DRAFTING", (2,))
    monkeypatch.setattr(recorded, "DRAFT_WIDTHS", (4,))
    replayed, run = [], RecordedSteps.run

    def counted(self, plan):
        output = run(self, plan)
        replayed.append((len(plan.drafts.counts) > 0, output is not None))
        return output

    monkeypatch.setattr(RecordedSteps, "run", counted)
    asks = [Ask(tokens(12, seed=1), greedy(9)), Ask(tokens(5, seed=3), seeded(6, seed=7))]
    model = dummy_model(FEW_LAYERS[family], operations=PLAIN)
    model.keep("auto", states)
    wanted = serve(cpu_engine(model), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted, strict=True)}
    drafting = ScriptedDrafting(known, 3, seed=5)
    found = serve(cuda_engine(model, drafting=drafting, max_sequences=2, depth=0), asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for mine, theirs in zip(found, wanted):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)
    assert (True, True) in replayed
    assert (True, False) not in replayed
    assert drafting.counts.accepted.total() > 0


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5", "falcon_h1", "gemma3"))]
)
def test_recorded_steps_verify_drafts_with_the_kernels_of_a_gpu(family, monkeypatch):
    answer_both(family, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_recorded_steps_verify_drafts_over_states_in_fewer_bits(family, monkeypatch):
    """A number that is nearly between two codes may be rounded to either."""
    answer_both(family, monkeypatch, "int8", tolerance=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", for_each(FAMILIES, "tiny {} float32 drafts"))
def test_drafts_change_no_token_on_a_gpu(family: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    llm = held(f"tiny {family} float32 drafts", lambda: load_tiny(family, "float32", draft="suffix"))
    spec, device = llm.engine.ledger.spec, llm.engine._device
    settings = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640, "paranoid": True, "depth": depth}
    config = EngineConfig(memory_bytes=llm.engine.config.memory_bytes, **settings)
    asks = make_asks(family, seed=3)
    wanted = serve(Engine(spec, device, config), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted, strict=True)}
    following, launch = [], device.launch
    monkeypatch.setattr(device, "launch", lambda plan: following.append(plan.drafts.may_move) or launch(plan))
    for seed in range(3):
        # At depth 1 the first draft is in flight already: a row of one draft has none left.
        drafting = ScriptedDrafting(known, 2 + 2 * seed, seed)
        found = serve(Engine(spec, device, config, drafting=drafting), asks)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
        assert drafting.counts.accepted.total() > 20
    assert any(following) == (depth == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "family", for_each(("nemotron_h", "qwen3_next", "kimi_linear", "falcon_h1"), "tiny {} float32 int8 states")
)
def test_drafts_over_states_in_fewer_bits_change_little_on_a_gpu(family: str, depth: int) -> None:
    """Rows of several tokens add in another order than decodes, and a number of a state may be rounded the other way.
    So texts may diverge, and until then they are as likely."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    group = f"tiny {family} float32 int8 states"
    llm = held(group, lambda: load_tiny(family, "float32", draft="suffix", state_dtype="int8"))
    asks = make_asks(family, seed=3)
    wanted = serve(make(llm, depth=depth), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted, strict=True)}
    drafting = ScriptedDrafting(known, 4, seed=1)
    found = serve(make(llm, drafting=drafting, depth=depth), asks)
    alike = 0
    for mine, theirs in zip(found, wanted, strict=True):
        same = [one == other for one, other in zip(mine.tokens, theirs.tokens)]
        length = same.index(False) if False in same else len(same)
        alike += length == len(theirs.tokens)
        assert mine.logprobs[:length] == pytest.approx(theirs.logprobs[:length], abs=0.05)
    assert alike >= len(asks) / 2
    assert drafting.counts.accepted.total() > 20


class Followed(ScriptedDrafting):
    """Three drafts in every row, some of them wrong, and no step that waits for them."""

    def begin(self, prompt, salt, most, prediction, grammar=None):
        script = super().begin(prompt, salt, most, prediction)
        script.wrong = 0.25
        return script

    def plans_ahead(self, known, unknown, lost):
        return True


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5", "falcon_h1", "gemma3"))]
)
def test_recorded_steps_follow_drafts_in_flight(family, monkeypatch):
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (16,))
    monkeypatch.setattr(recorded, "DRAFTING", (2,))
    monkeypatch.setattr(recorded, "DRAFT_WIDTHS", (4,))
    met, run = [], RecordedSteps.run

    def counted(self, plan):
        output = run(self, plan)
        if plan.drafts.may_move:
            followed = np.flatnonzero(plan.drafts.unverified_before)
            met.append((self.boards.moved[plan.seat[followed]].numpy() > 0).any())
        return output

    monkeypatch.setattr(RecordedSteps, "run", counted)
    asks = [Ask(tokens(12, seed=1), greedy(11)), Ask(tokens(9, seed=3), seeded(11, seed=7))]
    model = dummy_model(FEW_LAYERS[family], operations=PLAIN)
    plain = cpu_engine(model)
    before = watch(plain)
    wanted = serve(plain, asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted, strict=True)}
    engine = cuda_engine(model, drafting=Followed(known, 3, seed=5), max_sequences=2, depth=1)
    choices = watch(engine)
    found = serve(engine, asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert any(met), "some rows follow wrong drafts"
    assert not all(met)
    for number, ask in enumerate(asks):
        for place in range(ask.params.max_tokens):
            where = number, len(ask.prompt) + place
            check_inputs(ask.params, place, before.take(*where), choices.take(*where), exact=False)


def test_every_recorded_step_that_may_have_drafts_verifies_them():
    """The next step may follow them, whichever size it was that had room for them."""
    for size in step_sizes(32, room=3):
        inputs = StepInputs(
            size, 32, 4, replace(SPEC, draft_room=3), Store(SPEC, 1 << 16, scratch=True).scratch, "cpu", PLAIN
        )
        assert inputs.step.drafts is not None
        assert (inputs.step.following is not None) == (size.samples is not None)
        assert prompt_inputs(size).step.drafts is None
