"""Integers in groups, NVFP4 and MXFP8: what public tools write is read exactly, by every family, and stays packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.packed import ALL, AUTOROUND, AWQ, INTEGERS, SMALL_FLOATS, gptq, nvfp4
from tests.support.models.quantised import Written, quantise
from weft.base.errors import ModelError
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.experts import ExpertWeights, clamped
from weft.kernels.formats.blocks import OtherInputs
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.recipe import recipe_of
from weft.kernels.formats.stored import Dense, Stored
from weft.kernels.weight import Weight
from weft.models.model import MatrixLayer
from weft.models.sharding import Shard
from weft.models.weights import load_model

FIVE = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "lfm2", "gpt_oss"]
PROMPT = 70


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in found:
            found[family] = Oracle(FAMILIES[family]).save(tmp_path_factory.mktemp(family))
        return found[family]

    return folder


def load(folder: Path, operations=PLAIN, **more):
    return load_model(folder, torch.float32, progress=False, operations=operations, **more)[0]


def answer(folder: Path, operations=PLAIN) -> torch.Tensor:
    runner = DirectRunner(load(folder, operations), operations=operations)
    [logits] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    return logits


def parts_of(model):
    layers = [layer for layer in model.modules() if isinstance(layer, MatrixLayer)]
    return [part for layer in layers for name in layer.matrix_names() for part in layer.parts_of(name)]


@pytest.mark.parametrize("tool", ALL)
def test_every_tool_is_read(tool, saved, tmp_path):
    written, group = ALL[tool]
    small, wide = quantise(saved("qwen3_5_moe"), tmp_path, written, group)
    wanted = answer(wide)
    for operations in (PLAIN, CPU):
        torch.testing.assert_close(answer(small, operations), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tool", ["GPTQ 2, act-order", "AWQ", "NVFP4, ModelOpt"])
@pytest.mark.parametrize("family", FIVE)
def test_every_family_is_read_and_stays_packed(family, tool, saved, tmp_path):
    written, group = ALL[tool]
    small, wide = quantise(saved(family), tmp_path, written, group)
    kept = {type(part.format) for part in parts_of(load(small))}
    assert kept & {Grouped, OtherInputs, Nvfp4}
    wanted = answer(wide)
    for operations in (PLAIN, CPU):
        torch.testing.assert_close(answer(small, operations), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tool", ["compressed-tensors, zeros", "GPTQ", "GPTQ 2, act-order", *SMALL_FLOATS])
def test_two_ranks_hold_the_numbers_of_the_whole(tool, saved, tmp_path):
    written, group = ALL[tool]
    small, wide = quantise(saved("nemotron_h"), tmp_path, written, group)
    for rank in (0, 1):
        models = [load(folder, shard=Shard(rank, 2)) for folder in (small, wide)]
        layers = [[each for each in model.modules() if isinstance(each, MatrixLayer)] for model in models]
        for own, plain in zip(*layers, strict=True):
            for name in plain.matrix_names():
                found = torch.cat([part.decode() for part in own.parts_of(name)], -2)
                # compressed-tensors' NVFP4 stores an inverse.
                torch.testing.assert_close(found, plain.parts_of(name)[0].decode(), rtol=1e-6, atol=0)


def test_matrices_take_what_the_file_takes(saved, tmp_path):
    small, _ = quantise(saved("qwen3_5"), tmp_path, *ALL["compressed-tensors"])
    stored = load_file(small / "model.safetensors")
    for part in parts_of(load(small)):
        if isinstance(part.format, Grouped):
            assert part.bytes == part.outputs * (part.inputs // 2 + part.inputs // part.format.group * 2)
    held = sum(part.bytes for part in parts_of(load(small)) if isinstance(part.format, Grouped))
    assert held == sum(each.nbytes for name, each in stored.items() if name.endswith(("_packed", "weight_scale")))


def test_each_matrix_of_nvfp4_keeps_its_own_global_scale(saved, tmp_path):
    """Those of q, k and v differ by factors: one for all of them would lose what the small ones say."""

    def write(matrix: torch.Tensor):
        return nvfp4(divides=False)(matrix * (1 + matrix.shape[0] % 7) ** 3 / 64)

    small, wide = quantise(saved("llama"), tmp_path, Written(SMALL_FLOATS["NVFP4, ModelOpt"].config, write), 32)
    factors = [part.tensors[2] for part in parts_of(load(small)) if isinstance(part.format, Nvfp4)]
    assert any(len(each.unique()) > 1 for each in factors)
    torch.testing.assert_close(answer(small), answer(wide), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_mixes_formats_by_layer_as_nemotron_is_published(saved, tmp_path):
    """NVFP4 experts, FP8 projections of the recurrent layers and of the shared expert, attention in 16 bits."""
    from tests.support.models.quantised import by_tensor

    folder = saved("nemotron_h")
    _, wide = quantise(folder, tmp_path, SMALL_FLOATS["NVFP4, ModelOpt"], 32)
    tensors, layers = load_file(folder / "model.safetensors"), {}
    small, numbers = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        four = name.endswith(("up_proj.weight", "down_proj.weight")) and tensor.shape[1] % 16 == 0
        if not four and not name.endswith(("mixer.in_proj.weight", "mixer.out_proj.weight")):
            continue
        stored, numbers[name] = (nvfp4(divides=False) if four else by_tensor(()))(tensor)
        del small[name]
        small |= {name + suffix: each for suffix, each in stored.items()}
        layers[module] = {"quant_algo": "NVFP4", "group_size": 16} if four else {"quant_algo": "FP8"}
    config = json.loads((wide / "config.json").read_text())
    (wide / "hf_quant_config.json").write_text("{}")
    save_file({name: each.contiguous() for name, each in numbers.items()}, wide / "model.safetensors")
    wanted = answer(wide)
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "kv_cache_quant_algo": "FP8"}
    (wide / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    save_file({name: each.contiguous() for name, each in small.items()}, wide / "model.safetensors")
    (wide / "config.json").write_text(json.dumps(config))
    assert {type(part.format) for part in parts_of(load(wide))} == {Nvfp4, Fp8, Dense}
    for operations in (PLAIN, CPU):
        torch.testing.assert_close(answer(wide, operations), wanted, rtol=1e-4, atol=1e-4)


def test_rules_of_gptq_change_and_exclude_layers(saved, tmp_path):
    folder = saved("llama")
    written = INTEGERS["GPTQ"]
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    eight, kept = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"
    small, wide = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and "proj" in name and module != kept:
            own = INTEGERS["GPTQ, eight bits"] if module == eight else written
            stored, wide[name] = own.write(tensor)
            del small[name]
            small |= {module + suffix: each for suffix, each in stored.items()}
    dynamic = {f"+:.*{eight}": {"bits": 8, "group_size": -1}, "-:.*layers\\.0\\.self_attn\\.o_proj": {}}
    stated = gptq(4, 128, dynamic=dynamic)
    for target, content, more in (("small", small, {"quantization_config": stated}), ("wide", wide, {})):
        (tmp_path / target).mkdir()
        save_file({name: each.contiguous() for name, each in content.items()}, tmp_path / target / "model.safetensors")
        (tmp_path / target / "config.json").write_text(json.dumps(config | more))
    assert {part.format.bits for part in parts_of(load(tmp_path / "small")) if isinstance(part.format, Grouped)} == {
        4, 8
    }  # fmt: skip
    torch.testing.assert_close(answer(tmp_path / "small"), answer(tmp_path / "wide"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("stated", "name", "bits"),
    [
        (gptq(4, 128, modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]), "a.0.mlp.up_proj", 4),
        (gptq(4, 128, modules_in_block_to_quantize=[["self_attn.q_proj"]]), "a.0.mlp.up_proj", None),
        (AWQ, "model.layers.0.linear_attn.in_proj_ba", None),
        (AWQ, "model.layers.0.mlp.up_proj", 4),
        (AUTOROUND, "model.layers.0.linear_attn.in_proj_a", None),
        (AUTOROUND | {"extra_config": {"layers.0.up": {"bits": 8, "group_size": -1}}}, "model.layers.0.up", 8),
        (AUTOROUND | {"block_name_to_quantize": "model.layers"}, "model.head", None),
    ],
)
def test_lists_of_tools_say_what_is_quantised(stated, name, bits):
    scheme = recipe_of(stated).scheme_of(name)
    assert (None if scheme is None else scheme.bits) == bits


# Files and configurations that are wrong ------------------------------------------------------------------------------


def change(folder: Path, **tensors) -> Path:
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, edit in tensors.items():
        key = next(each for each in sorted(found) if each.endswith(f".{name}"))
        changed = edit(found.pop(key))
        if changed is not None:
            found[key] = changed.contiguous()
    save_file(found, file)
    return folder


@pytest.mark.parametrize(
    ("tool", "name", "edit", "message"),
    [
        ("compressed-tensors", "weight_scale", lambda x: x[:, :1], r"scales have shape \[\d+, 1\], expected \[\d+, \d"),
        ("compressed-tensors", "weight_packed", lambda x: x[:-1], r"scales have shape"),
        ("compressed-tensors", "weight_scale", lambda x: None, "missing: .*weight"),
        ("compressed-tensors, zeros", "weight_zero_point", lambda x: x[:-1], "zeros have shape"),
        ("compressed-tensors, zeros", "weight_zero_point", lambda x: None, "stated as asymmetric, but has no"),
        ("compressed-tensors, act-order", "weight_g_idx", lambda x: x[:-1], "g_idx has shape"),
        ("compressed-tensors, act-order", "weight_g_idx", lambda x: x * 0 + 1, "g_idx must put 32 inputs into each"),
        ("compressed-tensors, act-order", "weight_g_idx", lambda x: x + 2**30, "g_idx must put 32 inputs into each"),
        ("GPTQ", "qzeros", lambda x: x[:, :-1], "qzeros have shape"),
        ("GPTQ", "scales", lambda x: x.T, "scales have shape"),
        ("AWQ", "qweight", lambda x: x[:, :-1], "scales have shape"),
        ("NVFP4, ModelOpt", "weight_scale_2", lambda x: x * 0, "global scale of an NVFP4 matrix must be a positive"),
        ("NVFP4, ModelOpt", "weight_scale_2", lambda x: x.expand(3), "the global scale has shape"),
        ("MXFP8, ModelOpt", "weight_scale", lambda x: x[:, :-1], "scales have shape"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_in_one_line(tool, name, edit, message, saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, *ALL[tool])
    with pytest.raises(ModelError, match=message) as error:
        load(change(small, **{name: edit}))
    assert "\n" not in str(error.value)


def test_a_file_that_ends_early_is_refused_in_one_line(saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, *ALL["GPTQ"])
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot read") as error:
        load(small)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tool", "stated", "message"),
    [
        ("AWQ", {"version": "GEMV"}, "is quantised as awq gemv int 4 bits, which is not supported"),
        ("GPTQ", {"checkpoint_format": "marlin"}, "is quantised as gptq marlin int 4 bits, which is not supported"),
        ("GPTQ", {"bits": 3}, "gptq gptq int 3 bits, which is not supported"),
        ("GPTQ", {"group_size": 32}, "misshapen: .*scales have shape"),
        ("GPTQ", {"dynamic": {"+:(a+)+b": {}}}, "not a regular expression to use"),
        ("GPTQ", {"dynamic": 3}, "dynamic must be an object"),
        ("AutoRound as GPTQ", {"packing_format": "auto_round:triton"}, "auto-round triton int 4 bits, which is not"),
        ("AutoRound as GPTQ", {"data_type": "mx_fp"}, "auto-round gptq mx_fp 4 bits, which is not supported"),
        ("AutoRound as GPTQ", {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}, "as 16 bits"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(tool, stated, message, saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, *ALL[tool])
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] |= stated
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as error:
        load(small)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stated", "tool"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, r"ExLlamaV2 \(EXL2\)"),
        ({"quantization_config": {"quant_method": "exl3", "bits": 3}}, r"ExLlamaV3 \(EXL3\)"),
        ({"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)
def test_checkpoints_of_other_tools_are_refused_by_the_name_of_the_tool(stated, tool, saved, tmp_path):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text()) | stated
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"quantised by {tool}, ") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "tool"),
    [
        ({".weight": torch.uint32, ".scales": torch.float16, ".biases": torch.float16}, "MLX"),
        ({".q_weight": torch.int32, ".q_scale": torch.int32}, "EXL2"),
        ({".trellis": torch.int16, ".suh": torch.float16}, "EXL3"),
        ({".W_q": torch.uint8, ".scale": torch.float16}, "HQQ"),
        ({".weight": torch.uint8, ".weight.absmax": torch.uint8}, "bitsandbytes"),
    ],
)
def test_their_tensors_say_so_without_a_configuration(tensors, tool, saved, tmp_path):
    folder = saved("llama")
    found = load_file(folder / "model.safetensors")
    for name in [name for name in found if name.endswith("proj.weight")]:
        del found[name]
        found |= {
            name.removesuffix(".weight") + suffix: torch.zeros(4, 4).to(dtype) for suffix, dtype in tensors.items()
        }
    save_file(found, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=tool) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


# The formats alone ----------------------------------------------------------------------------------------------------

FORMS = [
    Grouped(4, 32), Grouped(4, 128, True), Grouped(8, 64), Grouped(8, 1 << 20, True), Grouped(4, 1 << 20), Nvfp4(),
]  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(format, *shape: int, seed: int = 0) -> Stored:
    return format.encode(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def name_of(format) -> str:
    return f"{format.name}, {format.group}, {format.has_zeros}" if isinstance(format, Grouped) else format.name


EACH = pytest.mark.parametrize("format", FORMS, ids=name_of)


@EACH
def test_cuts_and_orders_are_those_of_the_numbers(format):
    one = drawn(format, 10, 208)
    numbers, format = one.decode(), one.format
    index = torch.randperm(10)
    assert torch.equal(format.rows(one, index).decode(), numbers[index])
    assert torch.equal(format.cut_rows(one, 3, 7).decode(), numbers[3:7])
    for start, end in ((0, 208), (0, 64), (64, 208), (32, 96), (16, 48), (6, 10), (3, 7)):
        found = format.cut_columns(one, start, end)
        assert (found is not None) or end - start < 40
        if found is not None:
            assert torch.equal(found.decode(), numbers[:, start:end])
            assert torch.equal(found.format.cut_rows(found, 1, 5).decode(), numbers[1:5, start:end])
    halves = [format.cut_columns(one, 0, 64), format.cut_columns(one, 64, 208)]
    assert torch.equal(halves[0].format.abreast(halves).decode(), numbers)


@EACH
def test_parts_are_joined_and_scaled_exactly(format):
    one, two = drawn(format, 10, 208), drawn(format, 4, 208, seed=1)
    both = torch.cat([one.decode(), two.decode()])
    assert torch.equal(one.format.stacked([one, two]).decode(), both)
    factors = torch.rand(10)
    torch.testing.assert_close(one.format.scaled(one, factors).decode(), one.decode() * factors[:, None])
    torch.testing.assert_close(one.format.scaled(one, 0.7).decode(), one.decode() * 0.7)


def test_groups_of_two_sizes_are_joined_in_the_smaller_one():
    one, two = drawn(Grouped(4, 128), 6, 256), drawn(Grouped(4, 32), 6, 256, seed=1)
    found = one.format.stacked([one, two])
    assert found.format == Grouped(4, 32)
    assert torch.equal(found.decode(), torch.cat([one.decode(), two.decode()]))
    assert one.format.stacked([one, drawn(Grouped(4, 128, True), 6, 256)]) is None
    assert one.format.stacked([one, drawn(Grouped(8, 128), 6, 256)]) is None


@EACH
def test_random_weights_take_the_bytes_that_are_planned(format):
    one = drawn(format, 10, 208)
    assert one.bytes == one.format.bytes_of(10, 208)
    again = one.format.encode(one.decode())
    assert float((again.decode() - one.decode()).norm() / one.decode().norm()) < 0.07
    assert not one.format.encode(torch.zeros(3, 208)).decode().any()
    experts = drawn(format, 3, 4, 208)
    assert torch.equal(experts.expert(1).decode(), experts.decode()[1])


@pytest.mark.parametrize(("bits", "least"), [(4, 0.02), (8, 0.0)])
def test_cutting_off_outliers_makes_errors_smaller(bits, least):
    """A group without a search has the range that cuts nothing off."""
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    found = Grouped(bits, 128).encode(matrix)
    groups = matrix.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) * 2 / (2**bits - 1)
    whole = ((groups / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale).flatten(-2)
    errors = [float((each - matrix).square().sum()) for each in (found.decode(), whole)]
    assert errors[0] <= (1 - least) * errors[1] + 0.01 * least * errors[1]


def test_a_matrix_is_never_whole_in_float32():
    matrix, pieces = torch.randn(300, 200).bfloat16(), []
    whole = Grouped(4, 128).encode(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.kernels.formats.groups.ENCODED_AT_ONCE", 2000)
        original = Grouped._encoded
        patch.setattr(Grouped, "_encoded", lambda self, rows: pieces.append(rows.numel()) or original(self, rows))
        found = Grouped(4, 128).encode(matrix)
    assert max(pieces) <= 2000
    assert all(torch.equal(one, other) for one, other in zip(whole.tensors, found.tensors, strict=True))


# On a GPU, or in Triton's interpreter ---------------------------------------------------------------------------------

TILES = [Grouped(4, 32), Grouped(4, 128, True), Grouped(8, 64), Grouped(8, 96, True), Grouped(4, 1 << 20), Nvfp4()]


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("format", TILES, ids=name_of)
def test_kernels_multiply_the_decoded_numbers(format, rows):
    one = drawn(format, 70, 208)
    weight = Weight((one.to(DEVICE),), torch.randn(70, device=DEVICE))
    x = torch.randn(rows, 208, device=DEVICE)
    torch.testing.assert_close(multiply_stored(x, weight), PLAIN.linear(x, weight), rtol=1e-4, atol=1e-4)


def test_kernels_gather_inputs_that_are_stored_in_another_order():
    one = OtherInputs.of(drawn(Grouped(4, 32), 40, 64), torch.randperm(64))
    x, weight = torch.randn(3, 64, device=DEVICE), Weight((one.to(DEVICE),), None)
    torch.testing.assert_close(multiply_stored(x, weight), PLAIN.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", [Grouped(4, 32, True), Nvfp4()], ids=name_of)
def test_kernels_of_experts_equal_their_definition(format):
    first, second = drawn(format, 5, 128, 96), drawn(format, 5, 96, 64, seed=1)
    layer = ExpertWeights(first.to(DEVICE), second.to(DEVICE), clamped())
    x = torch.randn(13, 96, device=DEVICE) / 8
    weights, chosen = PLAIN.route_top(torch.randn(13, 5, device=DEVICE), 2)
    wanted = PLAIN.experts(x, (weights, chosen), layer)
    found = stored_experts(x, (weights.contiguous(), chosen.int().contiguous()), layer, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))
