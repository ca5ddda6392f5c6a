"""From a run of training to what is shipped and shown: files, names, sizes; every talk, and the curve."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft import LLM
from weft.text.template import load_template
from weft.text.tokenizer import load_tokenizer

from weft_training import export, show
from weft_training.template import END, JINJA, OVER, SPECIALS
from weft_training.tokenizer import make


@pytest.fixture
def run(tmp_path):
    """The state of a run that is under way, and a tokenizer beside it."""
    weights = {"model.embed.weight": torch.randn(50, 8), "model.norm.weight": torch.randn(8)}
    state = {f"model.{name}": tensor for name, tensor in weights.items()} | {"0.1.momentum": torch.zeros(3)}
    save_file(state | {"step": torch.tensor(7)}, tmp_path / "state.safetensors")
    tokenizer = make()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path, weights


def test_a_run_becomes_a_checkpoint_in_files_of_bounded_size(run, tmp_path, monkeypatch):
    folder, weights = run
    monkeypatch.setattr(export.split, "__defaults__", (500,))
    export.export(folder, folder, tmp_path / "model")
    places = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == weights.keys()
    assert len(set(places.values())) == 2
    for name, file in places.items():
        stored = load_file(tmp_path / "model" / file)[name]
        assert stored.equal(weights[name].to(torch.bfloat16))


def test_what_is_exported_talks_and_stops_as_it_was_trained(run, tmp_path):
    folder, _ = run
    export.export(folder, folder, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.end_tokens == {tokenizer.special_token(END), tokenizer.special_token(OVER)}
    assert load_template(tmp_path / "model", {}).source == JINJA
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3_5ForCausalLM"])
    assert (tmp_path / "model" / "LICENSE").read_text().count("Apache License")


def test_an_older_export_is_replaced_whole_and_a_link_is_not_followed(run, tmp_path):
    folder, _ = run
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("keep")
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    export.export(folder, folder, tmp_path / "model")
    assert not (tmp_path / "model").is_symlink()
    (tmp_path / "model" / "old").write_text("gone")
    export.export(folder, folder, tmp_path / "model")
    assert not (tmp_path / "model" / "old").exists()
    assert (tmp_path / "elsewhere" / "mine").read_text() == "keep"


def test_what_does_not_fit_into_the_package_is_refused(run, tmp_path, monkeypatch):
    folder, _ = run
    monkeypatch.setattr(export, "WHOLE_BYTES", 1 << 10)
    with pytest.raises(SystemExit, match="more than"):
        export.export(folder, folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_every_talk_is_shown_with_all_its_turns(monkeypatch):
    assert len(show.TALKS) >= 20
    assert max(len(talk.said) for talk in show.TALKS) >= 5
    few = (show.Talk("A greeting", ("Hello", "And you?")), show.Talk("Rules", ("Why?",), system="Be brief."))
    monkeypatch.setattr(show, "TALKS", few)
    monkeypatch.setattr(show, "ANSWER_TOKENS", 4)
    with LLM(memory="64MiB", threads=1, progress=False) as llm:
        first, second = show.samples(llm), show.samples(llm)
    assert first == second
    for said in ("### 1. A greeting", "### 2. Rules", "> **user:** And you?", "> **system:** Be brief.", "3 answers"):
        assert said in first
    assert first.count("(cut after 4 tokens)") + first.count("weft-small:**") >= 3


def test_the_curve_and_the_figures_come_from_the_log(tmp_path):
    log = [{"step": s, "bits_made": 2.0 / s, "bits_novels": 3.0 / s} for s in range(1, 15)]
    log.append({"step": 20, "loss": 1.5, "tokens_per_second": 1000.0, "of": 20})
    told = show.figures(log)
    assert "After 20 steps at 1,000 tokens a second" in told
    assert "| made | 0.143 |" in told
    assert "| novels | 0.214 |" in told
    drawn = show.lines("Held-out text", show.courses(log), "step", "bits per byte")
    assert drawn.count("<polyline") == 2


def test_the_page_keeps_what_stands_outside_its_marks():
    page = "above\n<!-- samples -->\nold\n<!-- /samples -->\nbelow\n"
    assert show.put(page, "samples", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="no place for figures"):
        show.put(page, "figures", "new")
