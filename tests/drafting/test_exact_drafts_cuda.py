"""Drafts in exact mode on a GPU: every token is computed as a decode, so drafts change no bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.kernels.operations import PLAIN
from tests.support.kernels.plans import Capture, Row, make_plan
from tests.support.models.engines import Ask, dummy_model, serve, tokens
from tests.support.models.exact_steps import EXACT
from tests.support.models.exact_traffic import digesting
from tests.support.runner.cuda_runner import FEW_LAYERS
from weft.base.config import EngineConfig
from weft.base.plan import StepDrafts
from weft.drafting.policy.choosing import Drafting
from weft.engine.loop import Engine
from weft.kernels.cuda import exact_turns
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.cuda import recorded
from weft.runner.cuda.exact import ExactTurns, by_form, has_drafts, places_of, turns_of
from weft.runner.runner import Runner

CELL, ROOM, MEMORY = 8, 3, 1 << 22
ASKS = [Ask(tokens(5, seed=1), digesting(5, 1)), Ask(tokens(3, seed=3), digesting(4, 7), step=1)]


def exact_engine(model: CausalModel, drafting: Drafting | None = None, depth: int = 0) -> Engine:
    spec = MemorySpec(model.memories(EXACT), cell=CELL, draft_room=ROOM)
    settings = {"max_sequences": 2, "max_tokens_per_step": 32, "max_length": 64, "paranoid": True, "depth": depth}
    runner = Runner(
        model, spec, MEMORY, 2, operations=EXACT, numerics=ExactTurns(), recording=recorded.StepRecording(64)
    )
    return Engine(spec, runner, EngineConfig(memory_bytes=MEMORY, exact=True, **settings), drafting=drafting)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (16,))


def digests_with_drafts(family: str, depth: int) -> tuple[list, list]:
    model = dummy_model(FEW_LAYERS[family], torch.float16, operations=PLAIN)
    wanted = serve(exact_engine(model), ASKS)
    known = {tuple(ask.prompt): answer.tokens for ask, answer in zip(ASKS, wanted, strict=True)}
    drafting = ScriptedDrafting(known, ROOM, seed=5)
    found = serve(exact_engine(model, drafting, depth), ASKS)
    assert drafting.counts.accepted.total() > 0
    return [answer.digests for answer in found], [answer.digests for answer in wanted]


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5", "falcon_h1", "gemma3"))]
)
def test_drafts_change_no_digest_with_the_kernels_of_a_gpu(family: str, depth: int, few_sizes: None) -> None:
    found, wanted = digests_with_drafts(family, depth)
    assert found == wanted


@pytest.mark.slow
def test_tokens_of_a_sequence_in_one_turn_would_be_seen(few_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a recurrence that does not wait for the token before."""
    monkeypatch.setattr(exact_turns, "in_turns", lambda batch, sizes: batch)
    found, wanted = digests_with_drafts("lfm2", 0)
    assert found != wanted


def test_rows_take_turns_and_prompts_are_apart() -> None:
    rows = [
        Row(13, 17, read_slot=2, tail=4, seat=1, tokens=[1, 2, 3, 4], pages=[6, 8, 10], window_pages=[0]),
        Row(8, 14, tail=5, seat=2, tokens=[10, 11, 12, 13, 14, 15], pages=[15, 16], window_pages=[0]),
        Row(3, 5, tail=6, seat=3, tokens=[7, 8], pages=[17], window_pages=[0]),
        Row(4, 5, tail=7, seat=4, tokens=[9], pages=[18], window_pages=[0]),
    ]
    plan = replace(make_plan(rows, [Capture(0, 16, 9)]), drafts=StepDrafts(np.array([3, 0, 1, 0], np.int32)))
    assert has_drafts(plan)
    decodes, prompts = by_form(plan)
    assert (decodes.tolist(), prompts.tolist()) == ([0, 2, 3], [1])
    assert places_of(plan, prompts).tolist() == [4, 5, 6, 7, 8, 9]
    model = dummy_model(FEW_LAYERS["lfm2"], torch.float16, operations=PLAIN)
    runner = exact_engine(model)._device
    places, batch = turns_of(plan, decodes, runner.eager)
    assert plan.tokens[places].tolist() == [1, 7, 9, 2, 8, 3, 4]
    assert batch.token_ids.tolist() == [1, 7, 9, 2, 8, 3, 4]
    assert batch.tail.tolist() == [4, 6, 7, 4, 6, 4, 4]
    # The token that begins the next cell reads the state that the one before it writes.
    assert batch.closing.tolist() == [-1, -1, -1, -1, -1, 9, -1]
    assert batch.slot.tolist()[0] == 2
    assert batch.slot.tolist()[-1] == 9
