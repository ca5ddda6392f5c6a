"""Drafts change no token of real models: every family, every sampling parameter, with and without recorded steps."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.support.drafting.drafts_of_models import check_every_parameter
from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.kernels.operations import CPU
from tests.support.models.engines import (
    FAMILIES,
    TINY,
    Ask,
    dummy_model,
    greedy,
    make_engine,
    seeded,
    serve,
    tokens,
)
from weft.base.config import EngineConfig
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.loop import Engine
from weft.kernels.native import library, replay
from weft.kernels.native.replay import Replays
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

# One family of each kind of layers; the others meet the same plans in the slow tests.
QUICK = {
    ("qwen3_5", 0),
    ("falcon_h1", 1),
    ("lfm2", 1),
    ("nemotron_h", 0),
    ("gemma3", 1),
    ("llama", 0),
    ("qwen3_moe", 1),
}


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        pytest.param(family, depth, marks=() if (family, depth) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for depth in (0, 1)
    ],
)
def test_drafts_change_no_token_whatever_the_parameters(family: str, depth: int) -> None:
    check_every_parameter(family, depth)


def test_suffix_drafts_repeat_what_the_model_repeats() -> None:
    prompt = tokens(6, 5) * 8
    plain = serve(make_engine("llama"), [Ask(prompt, greedy(60))])[0]
    drafting = Drafting(7, costs=FreeDrafts())
    steps: list[int] = []
    engine = make_engine("llama", drafting=drafting)
    found = serve(engine, [Ask(prompt, greedy(60))])[0]
    steps.append(engine.planner.number)
    assert found.tokens == plain.tokens
    assert found.report.drafts.proposed > 0
    # The second time, the answer is known from the first, to the same salt only.
    again = serve(engine, [Ask(prompt, greedy(60))])[0]
    steps.append(engine.planner.number - steps[0])
    assert again.tokens == plain.tokens
    assert steps[1] < 30
    other = serve(engine, [Ask(prompt, greedy(60), salt=b"other")])[0]
    assert other.tokens == plain.tokens
    assert other.report.drafts.accepted < again.report.drafts.accepted / 2


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each != "qwen3_5")]
)
def test_rows_follow_drafts_in_flight(family: str) -> None:
    # The answers cross a border of the grid; all prompts are computed before the first decode.
    asks = [Ask(tokens(57 + 3 * n, n), params) for n, params in enumerate((greedy(20), seeded(20, 5), seeded(20, 6)))]
    answers = serve(make_engine(family), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    engine = make_engine(family, drafting=ScriptedDrafting(known, 5, seed=3), depth=1)
    moved, launch = [], engine._device.launch

    def counted(plan):
        refused = engine._device.placed.boards.refused
        moved.extend(refused[plan.seat].tolist() if len(plan.drafts.unverified_before) else [])
        return launch(plan)

    engine._device.launch = counted
    found = serve(engine, asks)
    assert [each.tokens for each in found] == [each.tokens for each in answers]
    assert len(set(moved)) > 1, "rows start at different places"


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2", "gemma3"])
def test_recorded_kernels_verify_drafts_bit_by_bit_as_decodes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.available():
        pytest.skip("needs a compiler")
    verified = []
    original = Replays.in_order

    def counted(self, batch):
        hidden = original(self, batch)
        verified.append(hidden is not None)
        return hidden

    monkeypatch.setattr(Replays, "in_order", counted)
    # The answers cross two borders of the grid; all prompts are computed before the first decode.
    asks = [Ask(tokens(57 + 3 * n, n), seeded(80, n)) for n in range(3)]
    # Without room for drafts in the tails, except those of Mamba2: where a ring begins again, its sums are split.
    answers = serve(make_engine(family, drafting=Drafting(6, suffixes=False) if family == "falcon_h1" else None), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    again = serve(make_engine(family, drafting=ScriptedDrafting(known, 6, seed=1)), asks)
    assert [(a.tokens, a.logprobs) for a in again] == [(a.tokens, a.logprobs) for a in answers]
    assert len(verified) > 10
    assert all(verified)


class Most(Random):
    """Chooses as many drafts as it may."""

    def randint(self, low: int, high: int) -> int:
        return high


@pytest.mark.parametrize("family", ["olmo_hybrid", "lfm2"])
def test_a_step_that_cannot_be_replayed_is_repeated_with_the_tails_of_its_beginning(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes a norm of OLMo-Hybrid; recordings of LFM2 get no memory."""
    if not library.available():
        pytest.skip("needs a compiler")
    monkeypatch.setattr(replay, "MOST_BYTES", 0)
    attempts = []
    original = Replays.in_order

    def counted(self, batch):
        new, hidden = self.is_new(batch), original(self, batch)
        attempts.append((new, hidden is None))
        return hidden

    monkeypatch.setattr(Replays, "in_order", counted)
    asks = [Ask(tokens(9 + 4 * n, n), seeded(30, n), step=3 * n) for n in range(3)]
    answers = serve(make_engine(family), asks)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, answers, strict=True)}
    drafting = ScriptedDrafting(known, 6, seed=1)
    drafting.random = Most(1)
    again = serve(make_engine(family, drafting=drafting), asks)
    for one, other in zip(answers, again, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=2e-4)
    assert (True, True) in attempts
    assert all(refused for _, refused in attempts)


def test_threads_do_not_change_the_order_of_a_sequences_tokens() -> None:
    """The states are so large that the heads are shared by threads, which take the last pieces first."""
    if not library.available():
        pytest.skip("needs a compiler")
    model = dummy_model(TINY["qwen3_5"].variant(linear_key_head_dim=128, linear_value_head_dim=128))
    spec = MemorySpec(model.memories(CPU), draft_room=6)
    config = EngineConfig(memory_bytes=64 << 20, max_sequences=4, max_length=256)
    before = torch.get_num_threads()
    try:
        runner = Runner(model, spec, config.memory_bytes, 4, threads=2)
        asks = [Ask(tokens(57, 1), seeded(40, 1))]
        [answer] = serve(Engine(spec, runner, config), asks)
        drafting = ScriptedDrafting({tuple(asks[0].prompt): answer.tokens}, 6, seed=5)
        [again] = serve(Engine(spec, runner, config, drafting=drafting), asks)
    finally:
        torch.set_num_threads(before)
    assert (again.tokens, again.logprobs) == (answer.tokens, answer.logprobs)
    assert drafting.counts.accepted.total() > 10
