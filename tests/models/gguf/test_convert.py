"""`weft convert`: a file that it writes is the checkpoint, and a folder that it writes is the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import llama_cpp
from tests.support.models.engines import TINY
from tests.support.models.gguf_files import convert as convert_by_hand
from tests.support.models.gguf_files import names_of, read, write
from tests.support.models.mtp_oracle import checkpoint as mtp_checkpoint
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from weft.base.gguf.header import read_header
from weft.cli.main import main
from weft.models.layers.attention import Attention
from weft.models.weights import has_head, load_model
from weft.text.tokenizer import load_tokenizer

# What files cannot state is as they have it.
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "qwen3_moe": {},
    "lfm2": {},
    "lfm2_moe": {},
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt_oss": {},
    "granite_moe_hybrid": {},
    "nemotron_h": {},
}


LONG = {
    "rope_type": "llama3",
    "rope_theta": 30000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields that files state in a way of their own.
VARIANTS = {
    "llama, stretched": ("llama", {"rope_parameters": LONG}),
    "gemma3, bounded logits": ("gemma3", {"query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0}),
    "gemma3, two windows for each layer without": (
        "gemma3",
        {"query_pre_attn_scalar": 32, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2},
    ),
}
CASES = {name: (name, {}) for name in FAMILIES} | VARIANTS


def checkpoint(family: str, folder: Path, **changes: object) -> Path:
    return Oracle(TINY[family].variant(**{**FAMILIES[family], **changes})).save(folder / family)


def loaded(place: Path) -> torch.nn.Module:
    return load_model(place, torch.float32, progress=False)[0]


def logits(place: Path) -> torch.Tensor:
    return logits_of(loaded(place))


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    runner, tokens = DirectRunner(model, 32 << 20), random_tokens(70, seed=2)
    return runner.step([(runner.open(tokens), len(tokens))])[0]


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_there_and_back_is_the_same_model(family, changes, tmp_path):
    folder, file, back = checkpoint(family, tmp_path, **changes), tmp_path / "model.gguf", tmp_path / "back"
    assert main(["convert", str(folder), str(file)]) == 0
    assert main(["convert", str(file), str(back)]) == 0
    given = loaded(folder)
    theirs, wanted = given.state_dict(), logits_of(given)
    for place in (file, back):
        model = loaded(place)
        ours = model.state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            # Norms are stored plus one, rates of decay as exponentials.
            assert torch.allclose(ours[name], tensor, rtol=1e-5, atol=1e-6), (place, name)
        torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3"])
def test_fields_that_a_configuration_leaves_out_are_written(family, tmp_path):
    usual = {
        "gemma3": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096},
        "gpt_oss": {"head_dim": 64, "sliding_window": 128},
        "qwen3": {"head_dim": 128},
    }[family]
    more = {"query_pre_attn_scalar": 256} if family == "gemma3" else {}
    folder, file = checkpoint(family, tmp_path, **usual, **more), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text())
    left_out = [*usual, *(["layer_types"] if family == "gemma3" else [])]
    (folder / "config.json").write_text(json.dumps({n: each for n, each in config.items() if n not in left_out}))
    assert main(["convert", str(folder), str(file)]) == 0
    torch.testing.assert_close(logits(file), logits(folder), rtol=1e-4, atol=1e-4)


def test_a_window_that_a_file_does_not_have_is_none(tmp_path):
    import transformers

    folder, file, back = checkpoint("mistral", tmp_path), tmp_path / "llama.gguf", tmp_path / "back"
    assert main(["convert", str(folder), str(file)]) == 0
    metadata, tensors = read(file)
    renamed = {name.replace("llama.", "mistral."): value for name, value in metadata.items()}
    named = write(tmp_path / "mistral.gguf", renamed | {"general.architecture": "mistral"}, tensors)
    assert main(["convert", str(named), str(back)]) == 0
    for place in (named, back):
        windows = {layer.form.window for layer in loaded(place).modules() if isinstance(layer, Attention)}
        assert windows == {None}
    assert transformers.AutoConfig.from_pretrained(back).sliding_window is None


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "lfm2_moe", "granite_moe_hybrid", "gpt_oss"])
def test_transformers_reads_a_folder_as_it_reads_the_checkpoint(family, tmp_path):
    import transformers

    folder, file, back = checkpoint(family, tmp_path), tmp_path / "model.gguf", tmp_path / "back"
    assert main(["convert", str(folder), str(file)]) == 0
    assert main(["convert", str(file), str(back)]) == 0
    tokens = torch.tensor([random_tokens(40, seed=4)])
    found = []
    for place in (folder, back):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        with torch.no_grad():
            found.append(model(input_ids=tokens, use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_head_that_predicts_further_tokens_goes_along(tmp_path):
    folder, head = mtp_checkpoint("qwen3_5").folder, mtp_checkpoint("qwen3_5").head
    file, back = tmp_path / "model.gguf", tmp_path / "back"
    assert main(["convert", str(folder), str(file)]) == 0
    assert main(["convert", str(file), str(back)]) == 0
    assert has_head(file, "checkpoint")
    assert has_head(back, "checkpoint")
    written = load_file(back / "model.safetensors")
    assert {name for name in written if name.startswith("mtp.")} == set(head)
    assert all(torch.allclose(written[name], tensor, atol=1e-6) for name, tensor in head.items())


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_a_quantised_file_has_types_by_matrix_and_is_near(kind, tmp_path):
    folder = checkpoint("lfm2", tmp_path, hidden_size=256, intermediate_size=256)
    file = tmp_path / "small.gguf"
    assert main(["convert", str(folder), str(file), "--quantize", kind]) == 0
    types = {each.type for each in read_header(file).tensors.values()}
    assert types == ({"F32", "Q8_0"} if kind == "q8_0" else {"F32", "Q4_K", "Q6_K"})
    found, expected = logits(file), logits(folder)
    assert (found - expected).norm() / expected.norm() < (0.06 if kind == "q8_0" else 0.5)


def test_a_file_of_blocks_becomes_a_folder_of_their_numbers(tmp_path):
    """Also where inputs of blocks stay in another order."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "linear_value_head_dim": 64}
    folder = checkpoint("qwen3_5", tmp_path, **wide)
    file = convert_by_hand(folder, tmp_path / "small.gguf", names_of(("Q4_K", "Q6_K")))
    back = tmp_path / "back"
    assert main(["convert", str(file), str(back)]) == 0
    # The folder has 16 bits.
    found, expected = logits(back), logits(file)
    assert (found - expected).norm() / expected.norm() < 0.05


def test_text_means_the_same_tokens(tmp_path):
    folder, file, back = checkpoint("llama", tmp_path), tmp_path / "model.gguf", tmp_path / "back"
    llama_cpp.save_tokenizer(folder, every_byte=True)
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**stated, "chat_template": "{{ messages[0].content }}"}))
    assert main(["convert", str(folder), str(file)]) == 0
    assert main(["convert", str(file), str(back)]) == 0
    found = [load_tokenizer(place) for place in (folder, file, back)]
    for text in ("It's the 3rd time, naïve 世界 \n\n<eos> x", "  two  spaces "):
        assert len({tuple(each.encode(text)) for each in found}) == 1
    assert read_header(file).metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert json.loads((back / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"


REFUSED = {
    "a family that is folded": ("falcon_h1", {}, "FalconH1ForCausalLM cannot be written"),
    "a window": ("mistral", {"sliding_window": 70}, "a sliding window cannot be written"),
    "a window that the configuration leaves out": ("mistral", {"sliding_window": ...}, "a sliding window cannot be"),
    "windows of some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
        r"cannot state model.layers.1.self_attn.form.window: it is 70",
    ),
    "another activation": ("llama", {"hidden_act": "gelu"}, "cannot state model.layers.0.mlp.activation: it is 'gelu'"),
    "factors of another context": (
        "llama",
        {"rope_parameters": {**LONG, "original_max_position_embeddings": 1024}},
        "cannot state model.rotary.frequency",
    ),
    "an irregular order": ("qwen3_5", {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
                           "at regular intervals"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_file_cannot_say_is_refused_in_one_line(family, changes, message, tmp_path, capsys):
    published = {name: None for name, value in changes.items() if value is ...}
    folder = Oracle(TINY[family].variant(published, **changes)).save(tmp_path / "model")
    assert main(["convert", str(folder), str(tmp_path / "model.gguf")]) != 0
    told = capsys.readouterr().err
    assert message in told
    assert not (tmp_path / "model.gguf").exists()


def test_an_existing_target_is_kept(tmp_path, capsys):
    folder, target = checkpoint("llama", tmp_path), tmp_path / "model.gguf"
    target.write_text("mine")
    assert main(["convert", str(folder), str(target)]) != 0
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "mine"
