"""What the benchmarks of a GPU compare with is counted right, and they can be driven: on a CPU, slowly."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from benchmarks import draft_costs, draft_prose, draft_texts, drafts, mask_gap, mask_rates, mtp
from benchmarks.floors import Sketch
from benchmarks.gpu import Ask, Attempts, fresh, play, random_prompt
from benchmarks.serving import conversations, rates
from tests.support.models import tiny_model
from tests.support.models.mtp_oracle import checkpoint
from weft import LLM
from weft.base.options import Options
from weft.engine.loop import Engine
from weft.kernels.cpu import following
from weft.runner.cuda import recorded
from weft.start.loading import load


@pytest.fixture(scope="module")
def llm():
    options = {"threads": 1, "device": "cpu", "max_length": 2048, "max_sequences": 32}
    with LLM(**tiny_model.OPTIONS, memory="64MiB", progress=False, **options) as found:
        yield found


def test_weights_of_an_untied_embedding_are_not_read_and_those_of_a_head_are() -> None:
    untied, tied = Sketch.of("nemotron-nano-9b-v2"), Sketch.of("lfm2-1.2b")
    assert untied.weight_bytes - untied.active_weight_bytes(1) == 131072 * 4480 * 2
    assert tied.active_weight_bytes(1) == tied.weight_bytes
    # Neither multiplies a prompt's tokens, but for the last.
    assert untied.active_parameters() == pytest.approx(untied.weight_bytes / 2 - 2 * 131072 * 4480, rel=0.001)
    assert tied.active_parameters() == pytest.approx(tied.weight_bytes / 2 - 65536 * 2048, rel=0.001)


def test_of_experts_those_are_read_that_some_token_chose() -> None:
    sketch = Sketch.of("gpt-oss-20b")
    experts = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880) * 2
    rest = sketch.active_weight_bytes(10**6) - experts
    assert sketch.active_weight_bytes(1) == pytest.approx(rest + experts * 4 / 32)
    # Two tokens choose four experts each, of which some are the same.
    assert sketch.active_weight_bytes(2) == pytest.approx(rest + experts * (8 - 4 * 4 / 32) / 32)


def test_a_row_reads_its_checkpoint_its_tail_and_its_keys_and_values() -> None:
    plain, hybrid = Sketch.of("gemma-3-12b"), Sketch.of("lfm2-1.2b")
    per_token = 2 * 8 * 256 * 2
    # At position 2,000 forty layers see their window of 1,024, eight all; each writes one token.
    assert plain.memory_bytes(2000) == per_token * (40 * 1025 + 8 * 2001)
    state, kept, kv = 10 * 2 * 2048 * 2, 10 * 3 * 2048 * 2, 6 * 2 * 8 * 64 * 2
    assert hybrid.memory_bytes(130) == state * (1 + 1 / 64) + kept + kv * 131
    assert hybrid.memory_bytes(3) == state / 64 + kept + kv * 4


def test_operations_of_a_prompt_are_those_of_weights_and_of_pairs_within_windows() -> None:
    sketch = Sketch.of("gemma-3-12b")
    weights = 2 * sketch.active_parameters() * 1500
    full, windowed = 1500 * 1501 / 2, 1024 * 1025 / 2 + 476 * 1024
    assert sketch.prefill_operations(1500) == weights + 4 * 16 * 256 * (8 * full + 40 * windowed)


def test_requests_are_played_to_their_end_and_hits_are_told(llm: LLM) -> None:
    engine, stem = fresh(llm), random_prompt(llm, 130, 1)
    first = Ask(stem, 5)
    play(engine, [first])
    asks = [Ask(np.concatenate([stem, random_prompt(llm, 20, 2, n)]), 3) for n in range(4)]
    found = rates(asks, play(engine, asks))
    assert [len(ask.tokens) for ask in [first, *asks]] == [5, 3, 3, 3, 3]
    assert found["hit_share"] == pytest.approx(128 / 150)
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(12)
    assert engine.idle


def test_conversations_feed_their_answers_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONVERSATIONS": 3, "TURNS": 3, "BEGINNING": 100, "TURN": 40, "TURN_ANSWER": 30}.items():
        monkeypatch.setattr(f"benchmarks.serving.{name}", value)
    found = conversations(llm)
    # Prompts of 140, 210 and 280 tokens; the second and third resume at 128 and 192.
    assert found["hit_share"] == pytest.approx((128 + 192) / (140 + 210 + 280))


def test_a_part_that_fails_is_noted_and_the_next_runs() -> None:
    attempts, done = Attempts(), SimpleNamespace(parts=0)
    for name in ("good", "bad", "good again"):
        with attempts.part(name):
            if name == "bad":
                raise ValueError("no room\nand more lines")
            done.parts += 1
    assert (done.parts, attempts.errors) == (2, {"bad": "ValueError: no room"})


def test_edits_are_measured_with_and_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_texts, "FILE", 90)
    monkeypatch.setattr(draft_texts, "CHANGED_EVERY", 30)
    options = {"threads": 1, "device": "cpu", "max_length": 256, "max_sequences": 2, "draft": "suffix"}
    with LLM(**tiny_model.OPTIONS, memory="64MiB", progress=False, **options) as llm:
        text, edited = draft_texts.edited_file(llm.vocab_size)
        work = draft_texts.Work([text] * 2, len(edited), edited.tolist(), rows=2)
        found = draft_texts.compare(llm, work, rounds=2)
    # One token was changed, one removed, one is new.
    assert len(edited) == 90
    for draft in draft_texts.DRAFTS:
        # The first ones come while prompts are computed.
        assert 2 * 90 - 10 < found[draft]["tokens"] < 2 * 90
        assert found[draft]["computed"] >= found[draft]["steps"] > 0
    assert "tokens/s" in draft_texts.line_of("file", found)


@pytest.mark.thorough
def test_prose_of_engines_in_turns_is_compared_place_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_prose, "STORY", 40)
    options = {"device": "cpu", "max_length": 256, "max_sequences": 2, "memory": "64MiB", "draft": "suffix"}
    loaded, prompts = (
        load(Options(**tiny_model.OPTIONS, **options), progress=False),
        [np.arange(1, 9, dtype=np.int32)] * 2,
    )
    engines = {draft: draft_prose.engine_of(loaded, draft, threads=1) for draft in ("off", "suffix")}
    specs = {draft: engine.ledger.spec for draft, engine in engines.items()}
    assert 0 == specs["off"].draft_room < specs["suffix"].draft_room
    assert [engine.planner.drafting is None for engine in engines.values()] == [True, False]
    draft_prose.record_steps(engines, np.array([1, 2, 3] * 6, np.int32), rows=2)
    assert engines["suffix"].planner.drafting.overall == {}
    rounds = iter((False, True))
    found = draft_prose.measure(engines, prompts, 2, lambda: next(rounds))
    # The first story is not counted. Of each later one, two turns are whole and the last has fewer tokens.
    assert [len(turns) for turns in found.values()] == [2, 2]
    assert all(turn.tokens >= 2 * draft_prose.TURN for turns in found.values() for turn in turns)
    assert [line.split()[0] for line in draft_prose.lines_of(found)[1:]] == ["off", "suffix"]
    for engine in engines.values():
        engine.close()


def test_rates_in_turns_are_relative_to_the_same_places_and_have_an_error() -> None:
    random = np.random.default_rng(1)
    slow = 1 + 5 * (random.random(400) < 0.1)
    base = [draft_prose.Turn(16, seconds, 1.0) for seconds in slow * random.normal(1, 0.01, 400)]
    other = [draft_prose.Turn(16, seconds / 0.98, 2.0) for seconds in slow * random.normal(1, 0.01, 400)]
    (of_all, error), (median, of_median) = draft_prose.relative(base, other, "seconds")
    assert 0 < of_median < 0.002
    assert 0 < error < 0.005
    assert abs(median - 0.98) < 3 * of_median
    assert abs(of_all - 0.98) < 3 * error
    assert draft_prose.relative(base, other, "processor") == ((0.5, 0.0), (0.5, 0.0))


@pytest.mark.thorough
@pytest.mark.parametrize("benchmark", [drafts, mtp])
def test_verification_is_measured_with_scripted_acceptance(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(checkpoint("qwen3_5, one layer").folder)
    # The programs change these; afterwards they are as before.
    monkeypatch.setattr(following, "verify_drafts", following.verify_drafts)
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", recorded.PROMPT_TOKENS)
    monkeypatch.setattr(drafts, "machine", lambda device: {"device": device})
    for name, value in {"PROMPT": 16, "ANSWER": 24, "LENGTHS": (1, 3), "LENGTH_SECONDS": 0.0}.items():
        monkeypatch.setattr(drafts, name, value)
    monkeypatch.setattr(mtp, "MODELS", {model: (1, 2)})
    monkeypatch.setattr(benchmark, "warm_up", lambda *_, **__: None)
    arguments = Namespace(quick=False, device="cpu", dtype="float32", memory="64MiB", here=None, rows=[1, 2])
    arguments.only = [*benchmark.WAYS, *(["lengths"] if benchmark is drafts else [])]
    found = benchmark.measure(model, arguments)
    assert (found["errors"], [each["rows"] for each in found["rows"]]) == ({}, [1, 2])
    for each in found["rows"]:
        for name in ("three waiting", "three") if benchmark is drafts else mtp.WAYS:
            assert each[name] > 0
            assert each[f"{name} accepted"] == pytest.approx(3.0, abs=0.5)
        assert benchmark is drafts or each["mtp calls"] > 10
        if benchmark is drafts:
            lengths = each["lengths"]
            assert lengths["best"] in ("1", "3")
            assert lengths["ratio"] * lengths[lengths["best"]]["expected"] == pytest.approx(
                lengths["chosen"]["expected"]
            )
            # Tokens are those that are expected, but for luck.
            assert lengths["3"]["counted"] == pytest.approx(lengths["3"]["expected"], rel=0.2)
    benchmark.show(model, found)


@pytest.mark.thorough
def test_costs_of_drafts_are_measured_against_an_engine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROMPT": 16,
        "LONG_PROMPT": 100,
        "LONG_PROMPTS": 1,
        "LEARNING": 8,
        "ANSWER": 16,
        "ROUNDS": 1,
    }.items():
        monkeypatch.setattr(draft_costs, name, value)
    arguments = Namespace(device="cpu", dtype="float32", memory="256MiB", here=None, rows=[2])
    arguments.only = ["off", "suffix", "exact suffix"]
    model = str(checkpoint("qwen3_5, one layer").folder)
    found = draft_costs.measure(model, arguments)
    assert (found["errors"], [*found["ways"]]) == ({}, arguments.only)
    for name, each in found["ways"].items():
        assert min(each["start"], each["2 rows"], each["prompt"]) > 0
        assert ("2 rows, never" in each) == ("suffix" in name)
        assert ("2 rows, plain" in each) == (name == "exact suffix")
    draft_costs.show(model, found)


def test_rates_with_masks_are_those_of_answers_that_follow_the_grammar(llm: LLM) -> None:
    before, grammars = llm.engine, mask_gap.wide_grammars(llm.vocab_size)
    engine = Engine(before.ledger.spec, before._device, before.config, grammars)
    assert mask_rates.rate(engine, llm, 2, mask_gap.PEOPLE, 8) > 0
    words = mask_gap.wide_grammars(20_000)._words._tokenizer.words
    assert len(set(words)) == len(words) == 20_000
