"""FP8 checkpoints: what the public tools write is read exactly, cut exactly, and never unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.quantised import FP8, LISTED, by_block, quantise
from weft.base.errors import ModelError
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.experts import ExpertWeights, gated
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.matching import paths, targets_of
from weft.kernels.formats.stored import Stored, as_dense
from weft.kernels.weight import Weight
from weft.models.model import CausalModel, MatrixLayer
from weft.models.sharding import Shard
from weft.models.weights import load_model

HYBRIDS = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
    "kimi_linear",
    "falcon_h1",
    "llama",
]
PROMPT = 90


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in found:
            found[family] = Oracle(FAMILIES[family]).save(tmp_path_factory.mktemp(family))
        return found[family]

    return folder


def answer(folder: Path, operations=PLAIN, dtype=torch.float32) -> torch.Tensor:
    model, _ = load_model(folder, dtype, progress=False, operations=operations)
    runner = DirectRunner(model, operations=operations)
    [logits] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    return logits


def formats_of(folder: Path) -> set[type]:
    model, _ = load_model(folder, torch.float32, progress=False, operations=PLAIN)
    layers = [layer for layer in model.modules() if isinstance(layer, MatrixLayer)]
    return {type(part.format) for layer in layers for part in layer.stored_parts()}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_in_blocks_computes_what_its_numbers_say(family, saved, tmp_path):
    small, wide = quantise(saved(family), tmp_path, FP8["blocks"])
    assert Fp8 in formats_of(small)
    wanted = answer(wide)
    torch.testing.assert_close(answer(small), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer(small, CPU), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tool", FP8)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "nemotron_h"])
def test_every_tool_is_read(tool, family, saved, tmp_path):
    small, wide = quantise(saved(family), tmp_path, FP8[tool])
    torch.testing.assert_close(answer(small), answer(wide), rtol=1e-4, atol=1e-4)


def test_sixteen_bits_round_activations_only(saved, tmp_path):
    small, wide = quantise(saved("qwen3_5_moe"), tmp_path, FP8["blocks"])
    wanted = answer(wide)
    error = float((answer(small, CPU, torch.bfloat16).float() - wanted).norm() / wanted.norm())
    usual = float((answer(wide, CPU, torch.bfloat16).float() - wanted).norm() / wanted.norm())
    assert error < 1.5 * usual


def test_quantised_matrices_stay_quantised(saved, tmp_path):
    """No matrix of a quantised tensor is kept as plain numbers beside its codes, or instead of them."""
    small, _ = quantise(saved("qwen3_5"), tmp_path, FP8["blocks with short scales"])
    model, _ = load_model(small, torch.bfloat16, progress=False, operations=CPU)
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    stored = load_file(small / "model.safetensors")
    assert held < 1.1 * sum(each.numel() * (1 if each.dtype == torch.float8_e4m3fn else 2) for each in stored.values())
    assert any(each.dtype in (torch.float8_e4m3fn, torch.uint8) for each in model.parameters())


def kinds_of(model: CausalModel) -> dict[str, list[set[type]]]:
    """Return the formats of each layer's matrices. Where blocks end may differ with the order of outputs."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, MatrixLayer)}
    return {
        path: [{type(part.format) for part in layer.parts_of(name)} for name in layer.matrix_names()]
        for path, layer in layers.items()
    }


@pytest.mark.parametrize("family", ["qwen3_5_moe", "falcon_h1"])
def test_random_weights_have_the_formats_that_the_configuration_states(family, saved, tmp_path):
    small, wide = quantise(saved(family), tmp_path, FP8["blocks"])
    from_file, _ = load_model(small, torch.float32, progress=False, operations=PLAIN)
    random, _ = load_model(small, torch.float32, progress=False, weights="dummy", operations=PLAIN)
    plain, _ = load_model(wide, torch.float32, progress=False, weights="dummy", operations=PLAIN)
    assert kinds_of(from_file) == kinds_of(random)
    runner = DirectRunner(random, operations=PLAIN)
    [found] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    runner = DirectRunner(plain, operations=PLAIN)
    [wanted] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    # As far as rounding to eight bits goes.
    assert float((found - wanted).norm() / wanted.norm()) < 0.3


def test_a_tied_embedding_and_a_head_may_be_quantised(tmp_path):
    tied = Oracle(FAMILIES["llama"].variant(tie_word_embeddings=True)).save(tmp_path / "tied")
    for folder in (tied, Oracle(FAMILIES["llama"]).save(tmp_path / "untied")):
        tensors, decoded = load_file(folder / "model.safetensors"), {}
        small = dict(tensors)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                stored_as, decoded[name] = by_block(24, 40)(tensors[name])
                small |= {name + suffix: each for suffix, each in stored_as.items()}
        wanted = answer(change(folder, lambda all_of, new=decoded: all_of.update(new)))
        save_file(small, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8", "weight_block_size": [24, 40], "modules_to_not_convert": ["layers"]
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        torch.testing.assert_close(answer(folder), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(answer(folder, CPU), wanted, rtol=1e-4, atol=1e-4)


def test_the_digest_of_a_model_names_formats(saved, tmp_path):
    small, wide = quantise(saved("llama"), tmp_path, FP8["blocks"])
    models = [load_model(folder, torch.float32, progress=False, identify=True)[0] for folder in (small, wide, small)]
    digests = [model.weights_digest for model in models]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h"])
def test_two_ranks_hold_the_numbers_of_the_whole(family, saved, tmp_path):
    """Blocks of 24 x 40 are divided by most cuts."""
    small, wide = quantise(saved(family), tmp_path, FP8["blocks"])
    for rank in (0, 1):
        models = [
            load_model(folder, torch.float32, progress=False, operations=PLAIN, shard=Shard(rank, 2))[0]
            for folder in (small, wide)
        ]
        layers = [[each for each in model.modules() if isinstance(each, MatrixLayer)] for model in models]
        for own, plain in zip(*layers, strict=True):
            for name in plain.matrix_names():
                found = torch.cat([part.decode() for part in own.parts_of(name)], -2)
                assert torch.equal(found, plain.parts_of(name)[0].decode()), (type(own), name)


def change(folder: Path, edit) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return folder


def reconfigure(folder: Path, **fields) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config["quantization_config"] | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Q = "model.layers.0.self_attn.q_proj"


def drop_scales(tensors):
    del tensors[f"{Q}.weight_scale_inv"]


def cut_scales(tensors):
    tensors[f"{Q}.weight_scale_inv"] = tensors[f"{Q}.weight_scale_inv"][:1].clone()


def widen(tensors):
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].float()
    del tensors[f"{Q}.weight_scale_inv"]


def other_codes(tensors):
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].float().to(torch.float8_e5m2)


def strange(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight_zero"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_scales, "q_proj.weight has dtype F8_E4M3 without the tensors of a known format beside it"),
        (cut_scales, r"misshapen: .*q_proj\.weight: scales have shape \[1, 2\], expected"),
        (widen, "q_proj is stored as F32, but quantization_config states it as fp8"),
        (other_codes, "q_proj.weight has dtype F8_E5M2"),
        (strange, "unexpected: model.layers.0.self_attn.q_proj.weight_zero"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(edit, message, saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, FP8["blocks"])
    with pytest.raises(ModelError, match=message) as error:
        answer(change(small, edit))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "quip"}, 'quant_method "quip" is not supported'),
        ({"quant_method": ["fp8"]}, "quant_method .* is not supported"),
        ({"modules_to_not_convert": [*LISTED, "q_proj"]}, "states it as 16 bits"),
        ({"weight_block_size": [64, 64]}, "misshapen"),
        ({"weight_block_size": None}, "misshapen"),
        ({"weight_block_size": [0, -1]}, "weight_block_size must be two sizes"),
        ({"modules_to_not_convert": 3}, "modules_to_not_convert must be a list of names"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "strategy": "group"}}}},
            "q_proj is quantised as compressed-tensors int 4 bits group, which is not supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "q_proj is quantised as modelopt W4A16_AWQ"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:(a+)+b"], "weights": {}}}},
         "not a regular expression to use"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(fields, message, saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, FP8["blocks"])
    with pytest.raises(ModelError, match=message) as error:
        answer(reconfigure(small, **fields))
    assert "\n" not in str(error.value)


def test_without_a_configuration_quantised_tensors_are_refused(saved, tmp_path):
    small, wide = quantise(saved("llama"), tmp_path, FP8["blocks"])
    (small / "config.json").write_text((wide / "config.json").read_text())
    with pytest.raises(ModelError, match="is stored as fp8, but quantization_config states it as 16 bits"):
        answer(small)


def test_the_file_beside_the_configuration_counts_too(saved, tmp_path):
    small, wide = quantise(saved("qwen3_5"), tmp_path, FP8["ModelOpt"])
    stated = json.loads((small / "config.json").read_text())["quantization_config"]
    beside = {"quantization": {"quant_algo": "FP8", "exclude_modules": stated["ignore"]}}
    (small / "hf_quant_config.json").write_text(json.dumps(beside))
    (small / "config.json").write_text((wide / "config.json").read_text())
    torch.testing.assert_close(answer(small), answer(wide), rtol=1e-4, atol=1e-4)


# The format alone ----------------------------------------------------------------------------------------------------


def stored(outputs: int, inputs: int, rows: int, columns: int, seed: int = 0) -> Stored:
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    tensors, decoded = by_block(rows, columns)(matrix)
    found = Stored(Fp8(rows, columns), (tensors[""], tensors["_scale_inv"]), outputs, inputs)
    assert torch.equal(found.decode(), decoded)
    return found


SIZES = [(300, 200, 128, 128), (96, 160, 24, 40), (7, 64, 1, 64), (130, 70, 130, 70)]


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_are_cut_chosen_and_reordered_exactly(sizes):
    matrix = stored(*sizes)
    whole, outputs = matrix.decode(), sizes[0]
    for start, end in ((0, outputs), (1, 5), (outputs // 2, outputs), (3, outputs - 1)):
        assert torch.equal(matrix.format.cut_rows(matrix, start, end).decode(), whole[start:end])
    for index in (torch.tensor([3, 3, 0]), torch.randperm(outputs), torch.arange(outputs).flip(0)):
        assert torch.equal(matrix.format.rows(matrix, index).decode(), whole[index])
        assert torch.equal(matrix.format.reordered(matrix, index).decode(), whole[index])


def test_an_order_of_whole_blocks_keeps_them():
    matrix = stored(512, 64, 128, 64)
    index = torch.arange(512).view(2, 2, 128).transpose(0, 1).flatten()
    assert matrix.format.reordered(matrix, index).format == Fp8(128, 64)
    inside = torch.arange(512).view(4, 128).flip(1).flatten()
    assert matrix.format.reordered(matrix, inside).format == Fp8(128, 64)


@pytest.mark.parametrize("sizes", SIZES)
def test_columns_are_cut_exactly_or_not_at_all(sizes):
    matrix = stored(*sizes)
    whole, inputs = matrix.decode(), sizes[1]
    for start, end in ((0, inputs), (0, inputs // 2), (inputs // 2, inputs), (3, 5)):
        found = matrix.format.cut_columns(matrix, start, end)
        if found is None:
            assert sizes[3] != inputs
        else:
            assert torch.equal(found.decode(), whole[:, start:end])


def test_parts_are_joined_exactly_or_not_at_all():
    one, two, three = stored(256, 128, 128, 128), stored(100, 128, 128, 128, 1), stored(40, 128, 1, 128, 2)
    both = torch.cat([one.decode(), two.decode()])
    found = one.format.stacked([one, two])
    assert found.format == Fp8(128, 128)
    assert torch.equal(found.decode(), both)
    assert torch.equal(one.format.stacked([two, three]).decode(), torch.cat([two.decode(), three.decode()]))
    assert one.format.stacked([one, stored(8, 128, 8, 64)]) is None
    wide = one.format.abreast([one, stored(256, 200, 128, 128, 3)])
    assert torch.equal(wide.decode(), torch.cat([one.decode(), stored(256, 200, 128, 128, 3).decode()], 1))


def test_factors_are_folded_into_scales():
    matrix = stored(96, 160, 24, 40)
    torch.testing.assert_close(matrix.format.scaled(matrix, 0.7).decode(), matrix.decode() * 0.7)
    factors = torch.rand(96)
    torch.testing.assert_close(matrix.format.scaled(matrix, factors).decode(), matrix.decode() * factors[:, None])


@pytest.mark.parametrize("shape", [(300, 200), (3, 40, 72), (128, 128)])
def test_quantising_here_is_quantising_by_blocks(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    found = Fp8(128, 128).encode(matrix)
    assert found.tensors[0].dtype == torch.float8_e4m3fn
    error = (found.decode() - matrix).abs()
    assert bool((error <= matrix.abs() / 16 + matrix.abs().max() / 448 / 500).all())
    again = found.format.encode(found.decode())
    torch.testing.assert_close(again.decode(), found.decode())
    assert not Fp8(4, 4).encode(torch.zeros(4, 4)).decode().any()


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_decoded_numbers(rows, dtype):
    parts = (stored(300, 200, 128, 128), Stored.of(torch.randn(20, 200, dtype=dtype)), stored(40, 200, 1, 200, 4))
    bias, x = torch.randn(360, dtype=dtype), torch.randn(rows, 200, dtype=dtype)
    wanted = x.double() @ torch.cat([part.decode() for part in parts]).double().T + bias.double()
    for by in (PLAIN, CPU):
        found = by.linear(x, by.prepare(Weight(parts, bias), False))
        assert found.dtype == dtype
        most = (1e-5 if dtype == torch.float32 else 1e-2) * float(wanted.norm())
        assert float((found.double() - wanted).norm()) <= most
    assert torch.equal(as_dense(parts[0], dtype).dense, parts[0].decode().to(dtype))


# On a GPU, or in Triton's interpreter ---------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(part: Stored) -> Stored:
    return part.to(DEVICE)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("sizes", [(90, 200, 128, 128), (48, 96, 24, 32), (7, 72, 1, 72), (20, 80, 24, 40)])
def test_kernels_multiply_the_decoded_numbers(rows, sizes):
    parts = tuple(map(on_device, (stored(*sizes), Stored.of(torch.randn(20, sizes[1])))))
    bias, x = torch.randn(sizes[0] + 20, device=DEVICE), torch.randn(rows, sizes[1], device=DEVICE)
    wanted = PLAIN.linear(x, Weight(parts, bias))
    found = multiply_stored(x, Weight(parts, bias))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    for row in range(rows if DEVICE == "cuda" else 0):
        assert torch.equal(multiply_stored(x[row : row + 1], Weight(parts, bias)), found[row : row + 1])


@pytest.mark.parametrize("biased", [False, True])
def test_kernels_of_experts_equal_their_definition(biased):
    def matrices(outputs: int, inputs: int) -> Stored:
        each = [stored(outputs, inputs, 24, 32, seed) for seed in range(5)]
        tensors = tuple(torch.stack([one.tensors[k] for one in each]) for k in (0, 1))
        return on_device(Stored(each[0].format, tensors, outputs, inputs))

    biases = [torch.randn(5, size, device=DEVICE) if biased else None for size in (80, 72)]
    layer = ExpertWeights(matrices(80, 72), matrices(72, 40), gated(F.silu), *biases)
    x = torch.randn(21, 72, device=DEVICE) / 8
    weights, chosen = PLAIN.route_softmax(torch.randn(21, 5, device=DEVICE), 2, True)
    wanted = PLAIN.experts(x, (weights, chosen), layer)
    found = stored_experts(x, (weights.contiguous(), chosen.int().contiguous()), layer, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("expression", ["(a|a)*b", "((a*)b?)*c", "(a+)+b", ".*" * 20 + "b"])
def test_expressions_that_may_take_forever_are_refused(expression):
    with pytest.raises(ModelError, match="is not a regular expression to use"):
        targets_of([f"re:{expression}"])
    assert targets_of([r"re:.*self_attn\.(q|k|v)_proj$"])("model.layers.0.self_attn.q_proj")


def test_names_with_many_wildcards_are_compared_in_no_time():
    """A search that goes back for each wildcard would not end."""
    assert not paths(["*a" * 100 + "b"])("a" * 300)
    assert paths(["layers.*.mlp.*.up"])("model.layers.3.mlp.1.up.x")
