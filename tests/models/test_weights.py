"""Checkpoints: what fits is loaded exactly, what does not is an error that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.support.kernels.operations import PLAIN
from tests.support.models.engines import FAMILIES as FAMILIES_OF_TESTS
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.plain_models import GEMMA3, GPT_OSS, LLAMA, QWEN3_MOE
from weft.base.errors import ModelError
from weft.models.config import Config
from weft.models.model import CausalModel
from weft.models.registry import FAMILIES, family_of
from weft.models.weights import load_model

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    kinds = {
        "llama": LLAMA,
        "qwen3_moe": QWEN3_MOE,
        "gpt_oss": GPT_OSS,
        "tied": LLAMA.variant(tie_word_embeddings=True),
    }
    return {name: Oracle(tiny).save(tmp_path_factory.mktemp(name)) for name, tiny in kinds.items()}


def copy_with(folder: Path, target: Path, change) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        target / "model.safetensors",
    )
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> CausalModel:
    return load_model(folder, dtype, progress=False, **options)[0]


def answer(model: CausalModel) -> torch.Tensor:
    runner = DirectRunner(model)
    [logits] = runner.step([(runner.open(random_tokens(40, seed=1)), 40)])
    return logits


def assert_same(one: CausalModel, other: CausalModel) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_parts_of_packed_matrices_lie_in_order(saved):
    stored, model = load_file(saved["llama"] / "model.safetensors"), load(saved["llama"], operations=PLAIN)
    names = [LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"]
    qkv = model.model.layers[1].self_attn.qkv.weight
    assert torch.equal(qkv, torch.cat([stored[name] for name in names]))
    assert qkv.dtype == torch.float32
    short = load(saved["llama"], torch.bfloat16, operations=PLAIN)
    assert short.model.layers[1].self_attn.qkv.weight.dtype == torch.bfloat16


def test_a_missing_tensor_is_named(saved, tmp_path):
    folder = copy_with(saved["llama"], tmp_path, lambda t: t.pop(LAYER + "self_attn.k_proj.weight"))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load(folder)


def test_an_extra_tensor_is_named(saved, tmp_path):
    folder = copy_with(saved["llama"], tmp_path, lambda t: t.update({LAYER + "lora.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\.lora\.weight$"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(saved, tmp_path):
    folder = copy_with(saved["llama"], tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelError, match=r"misshapen: model\.norm\.weight has shape \[63\], expected \[64\]$"):
        load(folder)


def test_a_transposed_matrix_is_misshapen_even_though_its_size_fits(saved, tmp_path):
    name = LAYER + "mlp.down_proj.weight"
    folder = copy_with(saved["llama"], tmp_path, lambda t: t.update({name: t[name].T}))
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \[96, 64\], expected \[64, 96\]"):
        load(folder)


def test_everything_wrong_is_told_at_once_and_not_at_length(saved, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if "layers" in name]:
            del tensors[name]
        tensors["surprise"] = torch.zeros(1)

    with pytest.raises(ModelError, match=r"missing: .* and 17 more; unexpected: surprise"):
        load(copy_with(saved["llama"], tmp_path, change))


def test_frequencies_that_old_checkpoints_store_are_ignored(saved, tmp_path):
    name = LAYER + "self_attn.rotary_emb.inv_freq"
    load(copy_with(saved["llama"], tmp_path, lambda t: t.update({name: torch.zeros(8)})))


def test_a_tied_head_may_be_repeated_in_the_checkpoint(saved, tmp_path):
    repeated = copy_with(
        saved["tied"], tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})
    )
    assert_same(load(saved["tied"]), load(repeated))
    assert load(repeated).lm_head is None


@pytest.mark.parametrize("family", FAMILIES_OF_TESTS)
def test_a_head_of_its_own_is_used_even_if_the_configuration_ties_it(tmp_path, family):
    """As transformers does, which is asked here; dropping it would give other answers without a word."""
    import transformers

    tiny = FAMILIES_OF_TESTS[family].variant(tie_word_embeddings=False)
    oracle = Oracle(tiny)
    folder = oracle.save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tied = dict.fromkeys([name for name in ("tie_embedding", "tie_word_embeddings") if name in config], True)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True} | tied))
    theirs = (
        getattr(transformers, tiny.model_class)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    tokens = random_tokens(40, seed=1)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
    model = load(folder)
    assert model.lm_head is not None
    torch.testing.assert_close(answer(model)[-1], expected, atol=1e-4, rtol=1e-4)


def test_shards_are_joined_by_their_index(saved, tmp_path):
    tensors = load_file(saved["llama"] / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    assert_same(load(tmp_path), load(saved["llama"]))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-00002-of-00002\.safetensors"):
        load(tmp_path)


OUTSIDE = [
    "../outside/x.safetensors",
    "a/../../outside/x.safetensors",
    "/outside/x.safetensors",
    "..\\outside\\x.safetensors",
    "C:\\x.safetensors",
    "..",
    "",
    "x.bin",
    "x\0.safetensors",
    5,
    None,
    ["x.safetensors"],
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_may_not_name_files_outside_of_its_folder(saved, tmp_path, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    copy_with(saved["llama"], inside, lambda tensors: None)
    (tmp_path / "outside").mkdir()
    shutil.copy(saved["llama"] / "model.safetensors", tmp_path / "outside" / "x.safetensors")
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=r"must name .*safetensors files in its own folder") as error:
        load(inside)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weight_map", [None, [], "x", 5])
def test_an_index_without_a_map_is_one_line(saved, tmp_path, weight_map):
    copy_with(saved["llama"], tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="weight_map must be an object"):
        load(tmp_path)


def test_files_may_be_links_to_another_folder_as_in_the_hubs_cache(saved, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shutil.copy(saved["llama"] / "model.safetensors", blobs / "0123")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").write_text((saved["llama"] / "config.json").read_text())
    names = dict.fromkeys(load_file(blobs / "0123"), "model-00001-of-00001.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same(load(snapshot), load(saved["llama"]))


def test_experts_are_accepted_one_by_one_and_fused(saved, tmp_path):
    def fuse(tensors):
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{number}.{part}_proj.weight") for number in range(8)])
                for part in ("gate", "up", "down")
            )
            tensors[prefix + "gate_up_proj"] = torch.cat([gate, up], 1)
            tensors[prefix + "down_proj"] = down

    assert_same(load(copy_with(saved["qwen3_moe"], tmp_path, fuse)), load(saved["qwen3_moe"]))


def test_one_missing_expert_is_named_itself(saved, tmp_path):
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    with pytest.raises(ModelError, match=r"missing: model\.layers\.0\.mlp\.experts\.5\.up_proj\.weight$"):
        load(copy_with(saved["qwen3_moe"], tmp_path, lambda t: t.pop(name)))


def test_experts_that_are_missing_altogether_are_named_as_a_whole(saved, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if "layers.0.mlp.experts" in name]:
            del tensors[name]

    expected = r"missing: model\.layers\.0\.mlp\.experts\.gate_up_proj, model\.layers\.0\.mlp\.experts\.down_proj$"
    with pytest.raises(ModelError, match=expected):
        load(copy_with(saved["qwen3_moe"], tmp_path, change))


def test_pickled_weights_are_never_read(tmp_path, saved):
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"safetensors.*convert"):
        load(tmp_path)


def test_a_broken_file_is_named(saved, tmp_path):
    folder = copy_with(saved["llama"], tmp_path, lambda t: None)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


def test_what_is_neither_folder_nor_hub_id_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        load(tmp_path / "nothing" / "here")


def test_a_hub_id_that_cannot_be_had_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"nobody/nothing is neither a local folder nor in the cache, .*: HF_HUB_OFFLINE is set"
    ):
        load("nobody/nothing")


def test_a_hub_id_is_found_among_what_was_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--somebody--something"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **LLAMA.settings}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert load("somebody/something", weights="dummy").vocab_size == 256


def test_dummy_weights_need_only_a_configuration_and_depend_on_the_seed(tmp_path):
    file = tmp_path / "anything.json"
    file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **LLAMA.settings}))
    one, same, other = (load(file, weights="dummy", seed=seed) for seed in (1, 1, 2))
    assert_same(one, same)
    assert not torch.equal(answer(one), answer(other))
    matrix = one.model.layers[0].mlp.down_proj.weight
    assert float(matrix.std()) == pytest.approx(96**-0.5, rel=0.1)
    assert not torch.equal(matrix, one.model.layers[1].mlp.down_proj.weight)
    assert float(one.model.norm.weight.min()) == 1


@pytest.mark.parametrize("tiny", [GEMMA3, QWEN3_MOE, GPT_OSS], ids=lambda tiny: tiny.model_class)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dummy_models_answer_in_either_precision(tmp_path, tiny, dtype):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [tiny.model_class], **tiny.settings}))
    logits = answer(load(tmp_path, dtype, weights="dummy"))
    assert torch.isfinite(logits).all()
    assert float(logits.std()) > 0.1


def test_every_parameter_of_a_dummy_model_is_filled(tmp_path, monkeypatch):
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real(*a, **k).fill_(float("nan")))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"], **GPT_OSS.settings}))
    for name, tensor in load(tmp_path, weights="dummy").state_dict().items():
        assert torch.isfinite(tensor).all(), name


def test_however_long_loading_takes_there_is_no_bar_without_a_terminal(saved, monkeypatch, capsys):
    monkeypatch.setattr("weft.models.weights.BAR_SECONDS", 0.0)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        load_model(saved["llama"], torch.float32, progress=True)
        assert ("loading weights" in capsys.readouterr().err) == is_terminal


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"Gpt9ForCausalLM is not supported.*FalconH1ForCausalLM.*LlamaForCausalLM"):
        family_of({"architectures": ["Gpt9ForCausalLM"]})
    with pytest.raises(ModelError, match="has no architectures"):
        family_of({})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_has_its_family(architecture):
    assert issubclass(family_of({"architectures": [architecture]}), CausalModel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "must have hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3"),
        ({"hidden_act": "mish"}, "hidden_act must be one of .*silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor must be a number"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, message):
    fields = {"architectures": ["LlamaForCausalLM"], **LLAMA.settings, **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        load(tmp_path, weights="dummy")


def test_layer_types_of_the_wrong_length_are_refused():
    with pytest.raises(ModelError, match="layer_types must have 3 entries, got 1"):
        Config({"num_hidden_layers": 3, "layer_types": ["full_attention"]}).layer_types({"full_attention": "full"})


def test_broken_json_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load(tmp_path)
