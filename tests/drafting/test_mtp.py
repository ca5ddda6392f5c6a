"""MTP heads against a plain implementation: every draft token of an engine, whatever happened to its row before.

The plain implementation is that of `tests.support.models.mtp_oracle`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.drafting.mtp import (
    FAMILIES,
    ROOM,
    Drafts,
    check_a_seat_that_was_left_keeps_no_hidden_states,
    check_drafts,
    check_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right,
    check_hits,
    engine_of,
)
from tests.support.models import tiny_model
from tests.support.models.engines import Ask, greedy, seeded, serve, smallest_memory, tokens
from tests.support.models.hybrid_models import HYBRIDS
from tests.support.models.mtp_oracle import NEMOTRON, checkpoint
from tests.support.models.oracle import Oracle
from weft import LLM
from weft.base.errors import ModelError
from weft.base.options import Options
from weft.drafting import head as draft_head
from weft.drafting.head import DraftHead
from weft.drafting.policy.choosing import SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.models import mtp
from weft.models.mtp import head_of
from weft.models.weights import build, has_head
from weft.start.loading import chosen_draft

LARGER = ("qwen3_5_moe", "nemotron_h, latent experts in groups")


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.slow) for each in LARGER)])
def test_drafts_and_answers_are_those_of_a_plain_implementation(family: str) -> None:
    asks = [Ask(tokens(150, 1), greedy(16)), Ask(tokens(30, 2), seeded(16, 3), step=1), Ask([7], greedy(8), step=2)]
    engine = engine_of(family)
    found = serve(engine, asks)
    check_drafts(engine, family, least=20)
    logits = checkpoint(family).oracle.logits(asks[0].prompt + found[0].tokens)[149:-1]
    assert logits.argmax(-1).tolist() == found[0].tokens


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right(family: str) -> None:
    """With the head's output in place of the model's own hidden state, later drafts would differ."""
    check_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right(family)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_guesses_follow_drafts_in_flight(family: str) -> None:
    asks = [Ask(tokens(70 + 9 * n, n), greedy(60) if n else seeded(60, 3)) for n in range(3)]
    wanted = serve(engine_of(family), asks)
    engine = engine_of(family, depth=1)
    head = engine.planner.drafts.model
    head.answers = {tuple(ask.prompt): answer.tokens for ask, answer in zip(asks, wanted)}
    assert [answer.tokens for answer in serve(engine, asks)] == [answer.tokens for answer in wanted]
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 80
    assert counts.proposed.total() - counts.accepted.total() > 20
    assert head.followed > 40
    check_drafts(engine, family, least=50)


def test_guesses_are_frequent_tokens_where_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp.MtpHead, "limit", 100)
    monkeypatch.setattr(draft_head, "RARE_MEMORY", 2)
    asks = [Ask(tokens(40, 1), greedy(40))]
    engine = engine_of("qwen3_5")
    head = engine.planner.drafts.model
    [answer] = serve(engine, asks)
    logits = checkpoint("qwen3_5").oracle.logits(asks[0].prompt + answer.tokens)[39:-1]
    assert logits.argmax(-1).tolist() == answer.tokens
    rare = [token >= 100 for token in answer.tokens]
    assert 0 < sum(rare) < 40
    check_drafts(engine, "qwen3_5", least=20)
    assert {among for _, _, among in head.seen} == {100, 256}
    for text, _, among in head.seen[3:]:
        recent = [token >= 100 for token in text[-12:]]
        assert among == 256 or not all(recent)
        assert among == 100 or any(recent)


def test_after_a_hit_drafts_are_those_of_a_cold_run_and_never_from_another_salt() -> None:
    check_hits(engine_of("qwen3_5"))


def test_a_row_without_hidden_states_of_its_prefix_is_not_drafted_by_the_head(monkeypatch) -> None:
    """The target resumes behind cells that the head has lost. The row goes on with suffixes, which has none here."""
    left, leave = [], SequenceDrafts.leave_model
    monkeypatch.setattr(SequenceDrafts, "leave_model", lambda drafts: left.append(drafts) or leave(drafts))
    engine = engine_of("qwen3_5")
    head = engine.planner.drafts.model
    serve(engine, [Ask(tokens(150, 1), greedy(4))])
    head.flush()
    seen = len(head.seen)
    report = serve(engine, [Ask([*tokens(150, 1), 9], greedy(30))])[0].report
    assert report.cached_tokens >= 64
    assert len(head.seen) == seen
    assert report.drafts.proposed == 0
    assert len(left) == 1
    serve(engine, [Ask(tokens(40, 8), greedy(30))])
    assert len(left) == 1
    assert len(head.seen) > seen


def test_preemptions_and_little_memory_change_neither_drafts_nor_answers() -> None:
    asks = [Ask(tokens(20 + 7 * n, n), greedy(220), step=n) for n in range(4)]
    wanted = serve(engine_of("qwen3_5"), asks)
    # Enough to begin with all of them, and not to end.
    spec = engine_of("qwen3_5").ledger.spec
    memory = 13 * smallest_memory("qwen3_5", 270, 4, spec) // 10
    engine = engine_of("qwen3_5", memory=memory, head_memory=200_000, depth=1)
    found = serve(engine, asks)
    assert [a.tokens for a in found] == [a.tokens for a in wanted]
    assert engine.planner.preemptions > 0
    check_drafts(engine, "qwen3_5", least=10)


def test_a_seat_that_was_left_keeps_no_hidden_states() -> None:
    """Otherwise the next sequence there could read those of another one."""
    check_a_seat_that_was_left_keeps_no_hidden_states()


def test_reading_a_prompt_waits_for_no_landing() -> None:
    engine = engine_of("qwen3_5", depth=1)
    executor, silent = engine.planner.drafts.model.executor, []
    launch, land = executor.launch, executor.land

    def noted(plan):
        flight = launch(plan)
        silent.extend([] if len(plan.sampled) else [flight])
        return flight

    def landed(flight):
        assert not any(flight is each for each in silent)
        return land(flight)

    executor.launch, executor.land = noted, landed
    serve(engine, [Ask(tokens(150, 1), greedy(4))])
    assert silent


# loading --------------------------------------------------------------------------------------------------------------


def open_llm(**options: object) -> LLM:
    return LLM(progress=False, memory="32MiB", threads=1, max_length=512, draft="mtp", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_with_a_head_drafts_with_it(dtype: str) -> None:
    with open_llm(model=str(checkpoint("qwen3_5").folder), dtype=dtype) as llm:
        drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=DraftHead.name)
        llm.engine.planner.drafting = llm.engine.planner.drafts.drafting = drafting
        assert isinstance(llm.engine.planner.drafts.model, DraftHead)
        assert llm.engine.config.draft_bytes > 0
        assert llm.generate([np.arange(3, 40).tolist()], greedy(20), use_tqdm=False)[0].token_ids
        assert drafting.counts.proposed.total() > 0


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    plain = Oracle(HYBRIDS["qwen3_5"]).save(tmp_path)
    with pytest.raises(ModelError, match="has no MTP head"):
        open_llm(model=str(plain), dtype="float32")
    other = Oracle(HYBRIDS["lfm2"]).save(tmp_path / "lfm2")
    with pytest.raises(ModelError, match="or Nemotron-H with an MTP head"):
        open_llm(model=str(other), dtype="float32")


def test_auto_is_the_head_of_a_checkpoint_that_has_one_and_else_suffixes(tmp_path: Path) -> None:
    folder, plain = checkpoint("qwen3_5").folder, Oracle(HYBRIDS["qwen3_5"]).save(tmp_path)
    options = {"progress": False, "memory": "32MiB", "threads": 1, "max_length": 512, "draft": "auto"}
    for model, device, drafter in ((folder, "cuda", "mtp"), (plain, "cuda", "suffix"), (folder, "cpu", "suffix")):
        assert chosen_draft(Options(model=str(model), draft="auto"), Path(model), device)[0] == drafter
    with LLM(model=str(folder), **options) as llm:
        assert llm.engine.config.draft == "suffix"
        assert llm.engine.planner.drafts.model is None


@pytest.mark.parametrize(
    ("options", "device", "drafter"),
    [
        ({}, "cuda", "mtp"),
        ({}, "cpu", "suffix"),
        ({"exact": True}, "cuda", "off"),
        ({"tensor_parallel": 2}, "cuda", "suffix"),
    ],
)
def test_auto_is_what_works_where_a_head_does_not(options: dict, device: str, drafter: str) -> None:
    folder = checkpoint("qwen3_5").folder
    assert chosen_draft(Options(model=str(folder), draft="auto", **options), folder, device)[0] == drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_one_only_with_all_its_tensors(family: str, tmp_path: Path) -> None:
    whole = checkpoint(family)
    assert has_head(whole.folder, "checkpoint")
    (tmp_path / "config.json").write_text((whole.folder / "config.json").read_text())

    def found(tensors: dict[str, torch.Tensor]) -> bool:
        save_file(tensors, tmp_path / "model.safetensors")
        return has_head(tmp_path, "checkpoint")

    assert found(whole.head)
    for name, tensor in whole.head.items():
        assert not found({other: each for other, each in whole.head.items() if other != name}), name
        assert not found(whole.head | {name: tensor[..., :-1].contiguous()}), name
    assert not found(whole.head | {"mtp.unknown.weight": torch.zeros(1)})


def test_random_weights_have_a_head_if_the_configuration_says_so(tmp_path: Path) -> None:
    config = json.loads((tiny_model.FOLDER / "config.json").read_text())
    for count, expected in ((None, False), (0, False), (1, True), (2, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": count}))
        assert has_head(tmp_path, "dummy") is expected


def test_heads_of_several_layers_are_refused_by_name(tmp_path: Path) -> None:
    config = json.loads((tiny_model.FOLDER / "config.json").read_text()) | {"mtp_num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mtp_num_hidden_layers is 2"):
        open_llm(model=str(tmp_path), weights="dummy")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"mtp_layers_block_type": ["mamba", "moe"]}, "its blocks are mamba, moe"),
        ({"mtp_hybrid_override_pattern": "*M"}, "its blocks are attention, mamba"),
        ({"mtp_hybrid_override_pattern": "*?"}, "mtp_hybrid_override_pattern has '[?]'"),
        ({"mtp_hybrid_override_pattern": 7}, "must be a string, got 7"),
    ],
)
def test_nemotron_heads_of_other_blocks_are_refused_by_name(fields: dict, message: str) -> None:
    config = {"architectures": ["NemotronHForCausalLM"]} | NEMOTRON.settings | fields
    with pytest.raises(ModelError, match=message):
        build(config, torch.float32, "meta", family=head_of(config))


def test_exact_answers_keep_their_bits_with_a_head() -> None:
    params = replace(greedy(20), logits_digest=True)
    folder, prompt = str(checkpoint("qwen3_5").folder), tokens(80, 3)
    digests = []
    # With the same room in the tails: where a ring begins again, its sums are split.
    for draft in ("suffix", "mtp"):
        options = {"model": folder, "dtype": "float32", "memory": "32MiB", "threads": 1, "max_length": 512}
        with LLM(progress=False, exact=True, draft=draft, **options) as llm:
            digests.append(serve(llm.engine, [Ask(prompt, params)])[0].digests)
    assert digests[0] == digests[1]
