"""Draft models of real families beside real targets: answers stay, guesses of an equal model are all accepted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from tests.support.models.engines import FAMILIES, Ask, greedy, model_of, seeded, serve, spec_of, tokens
from weft import LLM, SamplingParams
from weft.base.config import EngineConfig
from weft.base.errors import ModelError
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.loop import Engine
from weft.memory.capacity import draft_share, least_bytes
from weft.memory.ledger import Ledger
from weft.runner.exact import ExactCells
from weft.runner.runner import Runner

ROOM = 4
MEMORY = 32 << 20
# Recurrent, windowed and plain memory on both sides; the others are slow tests.
QUICK = [("qwen3_5", "qwen3_5"), ("falcon_h1", "gemma3")]
ASKS = [
    Ask(tokens(57, 1), greedy(40)),
    Ask(tokens(130, 2), seeded(30, 7, top_k=9), step=1),
    Ask(tokens(57, 1)[:40] + tokens(30, 3), greedy(40, repetition_penalty=1.2), step=9),
]


def engine_with(family: str, drafter: str | None, exact: bool = False) -> Engine:
    config = EngineConfig(
        memory_bytes=MEMORY, max_sequences=4, max_tokens_per_step=96, max_length=320, paranoid=True, exact=exact
    )
    spec = replace(spec_of(family), draft_room=ROOM)
    runner = Runner(model_of(family), spec, MEMORY, 4, threads=1, numerics=ExactCells() if exact else None)
    drafting = Drafting(ROOM, costs=FreeDrafts(), suffixes=False, model="model")
    if drafter is None:
        return Engine(spec, runner, config)
    own = replace(spec_of(drafter), draft_room=ROOM)
    ledger = Ledger(own, MEMORY, 4, 320, remember_freed=True)
    model = DraftModel(ledger, Runner(model_of(drafter), own, MEMORY, 4, threads=1), 256, 96, paranoid=True)
    return Engine(spec, runner, config, drafting=drafting, draft_model=model)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [*QUICK, *(pytest.param(one, two, marks=pytest.mark.slow) for one in FAMILIES for two in FAMILIES)],
)
def test_a_draft_model_of_any_family_changes_no_token(family: str, drafter: str) -> None:
    plain = serve(engine_with(family, None), ASKS)
    engine = engine_with(family, drafter)
    found = serve(engine, ASKS)
    assert [a.tokens for a in found] == [a.tokens for a in plain]
    counts = engine.planner.drafting.counts
    assert counts.proposed.total() > 0
    if family == drafter:
        # Greedy rows without penalties are guessed by the same arithmetic.
        report = found[0].report.drafts
        assert report.accepted > 0.9 * report.proposed > 0


def test_a_draft_model_changes_no_bit_of_exact_answers() -> None:
    asks = [replace(ask, params=replace(ask.params, logits_digest=True)) for ask in ASKS]
    plain, found = (serve(engine_with("qwen3_5", drafter, exact=True), asks) for drafter in (None, "lfm2"))
    assert [a.digests for a in found] == [a.digests for a in plain]


# loading --------------------------------------------------------------------------------------------------------------


def open_llm(draft: str) -> LLM:
    return LLM(**tiny_model.OPTIONS, progress=False, memory="16MiB", threads=1, max_length=512, draft=draft)


def copy_of_tiny(folder: Path, **changes: object) -> str:
    shutil.copytree(tiny_model.FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def test_a_draft_model_is_loaded_by_its_folder_and_takes_its_share_of_memory() -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with open_llm("off") as plain, open_llm(str(tiny_model.FOLDER)) as drafted:
        wanted = plain.generate("Hello", params, use_tqdm=False)[0]
        found = drafted.generate("Hello", params, use_tqdm=False)[0]
        assert found.token_ids == wanted.token_ids
        config = drafted.engine.config
        assert config.memory_bytes + config.draft_bytes == plain.engine.config.memory_bytes
        assert config.draft_bytes > 4 << 20
        assert drafted.engine.planner.drafting.counts.accepted["model", 1] > 0


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = copy_of_tiny(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|pad|>", "<|other|>"))
    with pytest.raises(ModelError, match="vocabulary"):
        open_llm(other)


@pytest.mark.parametrize("field", ["dflash_config", "dspark_config"])
def test_drafters_that_read_hidden_states_are_refused_by_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=f"(?i){field[:6]} drafter"):
        open_llm(copy_of_tiny(tmp_path / "block", **{field: {"block_size": 8}}))


def test_both_models_have_memory_for_a_short_sequence_if_there_is_enough() -> None:
    large, small = spec_of("qwen3_5"), spec_of("llama")
    for memory in (least_bytes(large) + least_bytes(small) + 8192, 1 << 22, 1 << 26):
        share = draft_share(large, small, memory)
        assert least_bytes(small) <= share <= memory - least_bytes(large) + 4096
