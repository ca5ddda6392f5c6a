"""Checkpoints of hybrid families load in every layout, in both dtypes, and say what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.hybrid_models import HYBRIDS
from tests.support.models.oracle import DirectRunner, Oracle, Tiny, random_tokens
from weft.base.errors import ModelError
from weft.memory.spec import RecurrentMemory
from weft.models.model import CausalModel
from weft.models.weights import load_model

Tensors = dict[str, Tensor]


def saved(tiny: Tiny, folder: Path, change: Callable[[Tensors], Tensors] | None = None, **fields: object) -> Path:
    """A checkpoint as the public implementation writes it, then changed."""
    Oracle(tiny).save(folder)
    if change is not None:
        file = folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalModel:
    """A model whose weights lie as they are stored."""
    return load_model(folder, dtype, progress=False, operations=PLAIN)[0]


def stacked(tensors: Tensors, firsts: tuple[str, ...], second: str) -> Tensors:
    """Experts that are stored one by one, put into one tensor each for their first and second matrices."""
    found = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    single = {name: match for name in tensors if (match := found.fullmatch(name))}
    assert single, "nothing to stack: this family is not saved expert by expert any more"
    changed = {name: tensor for name, tensor in tensors.items() if name not in single}
    for path in {match[1] for match in single.values()}:
        count = sum(match[1] == path and match[3] == second for match in single.values())

        def stack(matrix: str, path: str = path, count: int = count) -> Tensor:
            return torch.stack([tensors[f"{path}.{number}.{matrix}.weight"] for number in range(count)])

        changed[path + (".gate_up_proj" if len(firsts) == 2 else ".up_proj")] = torch.cat(
            [stack(first) for first in firsts], 1
        )
        changed[path + ".down_proj"] = stack(second)
    return changed


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for pattern, replacement in pairs:
        assert any(re.search(pattern, name) for name in tensors), f"no tensor is called {pattern}"
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


LAYOUTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "lfm2_moe, stacked experts": ("lfm2_moe", lambda t: stacked(t, ("w1", "w3"), "w2")),
    "qwen3_next, stacked experts": ("qwen3_next", lambda t: stacked(t, ("gate_proj", "up_proj"), "down_proj")),
    "qwen3_5_moe, stacked experts": ("qwen3_5_moe", lambda t: stacked(t, ("gate_proj", "up_proj"), "down_proj")),
    "nemotron_h, stacked experts": ("nemotron_h", lambda t: stacked(t, ("up_proj",), "down_proj")),
    "nemotron_h, as model": ("nemotron_h", lambda t: renamed(t, ("^backbone", "model"))),
    "kimi_linear, stacked experts": ("kimi_linear", lambda t: stacked(t, ("w1", "w3"), "w2")),
    "kimi_linear, dense layer as published": (
        "kimi_linear",
        lambda t: renamed(t, (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj")),
    ),
    "granite, new names of experts": (
        "granite_moe_hybrid",
        lambda t: renamed(
            t,
            (r"moe\.input_linear\.weight", "moe.experts.gate_up_proj"),
            (r"moe\.output_linear\.weight", "moe.experts.down_proj"),
            (r"router\.layer\.weight", "router.weight"),
        ),
    ),
    "qwen3_5, inside a multimodal model": ("qwen3_5", lambda t: renamed(t, (r"^model\.", "model.language_model."))),
    "qwen3_5, beside vision and draft layers": (
        "qwen3_5",
        lambda t: t | {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 4)},
    ),
    "qwen3_next, beside draft layers": ("qwen3_next", lambda t: t | {"mtp.layers.0.mlp.gate.weight": torch.ones(4, 4)}),
    "nemotron_h, beside draft layers": ("nemotron_h", lambda t: t | {"mtp.layers.0.norm.weight": torch.ones(4)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_checkpoint_gives_the_same_parameters(layout, tmp_path):
    name, change = LAYOUTS[layout]
    expected = load(saved(HYBRIDS[name], tmp_path / "as_saved")).state_dict()
    found = load(saved(HYBRIDS[name], tmp_path / "changed", change)).state_dict()
    assert expected.keys() == found.keys()
    for parameter, tensor in expected.items():
        assert torch.equal(tensor, found[parameter]), parameter


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lfm2", "model.layers.0.conv.conv.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.A_log"),
        ("qwen3_5", "model.layers.1.linear_attn.in_proj_b.weight"),
        ("kimi_linear", "model.layers.0.self_attn.A_log"),
        ("kimi_linear", "model.layers.2.self_attn.kv_b_proj.weight"),
        ("nemotron_h", "backbone.layers.0.mixer.dt_bias"),
        ("falcon_h1", "model.layers.2.mamba.D"),
        ("falcon_h1", "model.layers.0.mamba.out_proj.weight"),
        ("falcon_h1", "model.layers.1.self_attn.o_proj.weight"),
        ("granite_moe_hybrid", "model.layers.0.mamba.norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, tensor, tmp_path):
    folder = saved(HYBRIDS[name], tmp_path, lambda t: {key: value for key, value in t.items() if key != tensor})
    leaf = tensor.split(".", 4)[-1]
    with pytest.raises(ModelError, match=rf"missing: \S*{re.escape(leaf)}"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "mamba2", "conv", "conv"]}, "mamba2"),
        ("granite_moe_hybrid", {"layer_types": ["mamba", "sliding_attention", "mamba"]}, "sliding_attention"),
        ("granite_moe_hybrid", {"layer_types": ["mamba"]}, "layer_types must have 3 entries, got 1"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "X"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type or hybrid_override_pattern"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must have 5 entries, got 1"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2 to 32"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads 4 must be a multiple"),
        ("nemotron_h", {"n_groups": 3}, "8 heads must be a multiple of the 3 groups"),
        ("granite_moe_hybrid", {"time_step_limit": [0.0, "low"]}, "time_step_limit must be two numbers"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act must be one of silu, got 'gelu'"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be true for this architecture, got False"),
        ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank must be null for this architecture, got 8"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, 'moe_router_activation_func must be "sigmoid"'),
        ("kimi_linear", {"layer_types": None}, "must have full_attn_layers"),
        ("kimi_linear", {"layer_types": None, "linear_attn_config": [1]}, "linear_attn_config must be an object"),
        *(
            ("kimi_linear", {"layer_types": None, "linear_attn_config": layers}, "must have each of 1 to 3 once")
            for layers in (
                {"full_attn_layers": [1], "kda_layers": [2, 2]},
                {"full_attn_layers": [0], "kda_layers": [1, 2]},
                {"full_attn_layers": ["1"], "kda_layers": [2, 3]},
            )
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_an_error_that_names_the_field(name, fields, message, tmp_path):
    folder = saved(HYBRIDS[name], tmp_path, **fields)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("of_mamba", [False, True])
@pytest.mark.parametrize("of_attention", [False, True])
def test_falcon_projects_once_for_both_mixers_whichever_has_a_bias(of_mamba, of_attention, tmp_path):
    tiny = HYBRIDS["falcon_h1"].variant(mamba_proj_bias=of_mamba, attention_bias=of_attention)
    folder = saved(tiny, tmp_path)
    stored, model = load_file(folder / "model.safetensors"), load(folder)
    mixers = [block.mixers for block in model.model.layers]
    for each in mixers:
        assert (each.in_proj.bias is not None) == (of_mamba or of_attention)
        assert each.mixers["mamba"].in_proj is each.mixers["self_attn"].qkv is None
    made_up = sum(len(each.in_proj.bias) for each in mixers) if of_mamba != of_attention else 0
    made_up -= sum(stored[name].numel() for name in stored if re.search(r"(in|[qkv])_proj\.bias", name) and made_up)
    assert sum(p.numel() for p in model.parameters()) == sum(tensor.numel() for tensor in stored.values()) + made_up


@pytest.mark.parametrize("of_mamba", [False, True])
@pytest.mark.parametrize("of_attention", [False, True])
def test_falcon_has_one_matrix_and_one_bias_behind_both_mixers(of_mamba, of_attention, tmp_path):
    tiny = HYBRIDS["falcon_h1"].variant(projectors_bias=of_mamba, attention_bias=of_attention)
    folder = saved(tiny, tmp_path)
    stored, model = load_file(folder / "model.safetensors"), load(folder)
    for number, block in enumerate(model.model.layers):
        scanned, attended = (f"model.layers.{number}.{name}" for name in ("mamba.out_proj", "self_attn.o_proj"))
        sides = [0.8 * stored[f"{scanned}.weight"], 0.9 * stored[f"{attended}.weight"]]
        torch.testing.assert_close(block.mixers.out_proj.weight, torch.cat(sides, 1))
        assert (block.mixers.out_proj.bias is not None) == (of_mamba or of_attention)
        if block.mixers.out_proj.bias is not None:
            of_one, of_other = (stored.get(f"{name}.bias", torch.zeros(())) for name in (scanned, attended))
            torch.testing.assert_close(block.mixers.out_proj.bias, 0.8 * of_one + 0.9 * of_other)


@pytest.mark.parametrize("leaf", ["mamba.out_proj.bias", "self_attn.o_proj.bias"])
def test_a_bias_that_is_added_to_another_is_missed_by_its_own_name_and_shape(leaf, tmp_path):
    folder = saved(HYBRIDS["falcon_h1"].variant(projectors_bias=True, attention_bias=True), tmp_path)
    stored, name = load_file(folder / "model.safetensors"), f"model.layers.0.{leaf}"
    bias = stored.pop(name)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"missing: {re.escape(name)}$"):
        load(folder)
    save_file(stored | {name: bias[:1].clone()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"misshapen: {re.escape(name)} has shape \[1\]"):
        load(folder)


@pytest.mark.parametrize("cuts", [None, [24, 24, 96], [48, 48, 48]])
def test_olmo_convolves_the_same_however_its_checkpoint_cuts_the_filter(cuts, tmp_path):
    parts = [f"{name}_conv1d.weight" for name in "qkv"]

    def recut(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for layer in (0, 1):
            path = f"model.layers.{layer}.linear_attn."
            whole = torch.cat([found.pop(path + part) for part in parts])
            pieces = {"conv1d.weight": whole} if cuts is None else dict(zip(parts, whole.split(cuts)))
            found |= {path + name: piece for name, piece in pieces.items()}
        return found

    folder = saved(HYBRIDS["olmo_hybrid"], tmp_path / "cut", recut)
    plain = load(saved(HYBRIDS["olmo_hybrid"], tmp_path / "plain"))
    for found, wanted in zip(load(folder).parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_part_of_a_filter_that_is_missing_or_too_long_is_named(tmp_path):
    name = "model.layers.0.linear_attn.k_conv1d.weight"
    without = saved(HYBRIDS["olmo_hybrid"], tmp_path / "a", lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(ModelError, match=r"missing: \S*(k_conv1d|conv1d)\.weight"):
        load(without)
    longer = saved(HYBRIDS["olmo_hybrid"], tmp_path / "b", lambda t: t | {name: torch.cat([t[name], t[name]])})
    with pytest.raises(
        ModelError, match=r"misshapen: \S*q_conv1d\.weight and \S*k_conv1d\S* and \S* has shape \[192, 1, 4\]"
    ):
        load(longer)


@pytest.mark.parametrize("name", HYBRIDS)
def test_in_bfloat16_decays_and_states_stay_float32_and_windows_do_not(name, tmp_path):
    model = load(saved(HYBRIDS[name], tmp_path), torch.bfloat16)
    decays = [parameter for path, parameter in model.named_parameters() if path.split(".")[-1] in ("A", "dt_bias", "D")]
    assert decays or name.startswith("lfm")
    assert all(parameter.dtype == torch.float32 for parameter in decays)
    for memory in model.memories(CPU):
        if isinstance(memory, RecurrentMemory):
            for part in (*memory.state, *memory.tail):
                assert part.dtype == ("bfloat16" if part.name == "conv" else "float32"), part


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_bfloat16_model_answers_almost_like_its_float32_self(name, tmp_path):
    folder = saved(HYBRIDS[name], tmp_path)
    prompt = random_tokens(100, seed=3)
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = DirectRunner(load_model(folder, dtype, progress=False)[0])
        sequence = runner.open(prompt)
        for count in (70, 27, 1, 1, 1):
            runner.step([(sequence, count)])
        outcomes.append(sequence.all_logits)
    # A router may choose another expert for a token here and there.
    assert float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm()) < 0.12


@pytest.mark.parametrize("name", HYBRIDS)
def test_dummy_weights_let_the_distant_past_matter(name, tmp_path):
    folder = saved(HYBRIDS[name], tmp_path)
    model, _ = load_model(folder, torch.float32, progress=False, weights="dummy")
    ending = random_tokens(40, seed=1)
    last = []
    for beginning in (random_tokens(100, seed=2), random_tokens(100, seed=3)):
        runner = DirectRunner(model)
        [logits] = runner.step([(runner.open(beginning + ending), 140)])
        last.append(logits[-1])
    assert torch.isfinite(last[0]).all()
    assert float((last[0] - last[1]).norm() / last[0].norm()) > 0.01
