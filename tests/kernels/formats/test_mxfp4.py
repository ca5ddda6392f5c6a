"""MXFP4: gpt-oss's blocks and compressed-tensors' packed form are read exactly and not unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.quantised import Written, quantise
from weft.base.errors import ModelError
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.experts import ExpertWeights, clamped
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.stored import Stored
from weft.kernels.weight import Weight
from weft.models.model import MatrixLayer
from weft.models.sharding import Shard
from weft.models.weights import load_model

# Of the sixteen codes.
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = torch.cat((NUMBERS, -NUMBERS))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks and scales of the nearest numbers, and those numbers."""
    blocks = values.unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1).clamp(min=1e-9) / 6).log2().ceil()
    power = exponent.exp2().unsqueeze(-1)
    codes = ((blocks / power).unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    decoded = (NUMBERS[codes] * power).flatten(-2)
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return packed, (exponent + 127).to(torch.uint8), decoded


def packed_by_compressed_tensors(matrix: torch.Tensor):
    codes, scales, decoded = pack(matrix)
    return {"_packed": codes.flatten(-2), "_scale": scales}, decoded


COMPRESSED = Written(
    {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*in_proj_(a|b|ba)$",
            "re:.*\\.gate$",
            "re:.*shared_expert_gate",
            "re:.*shared_expert\\.down",
        ],
    },
    packed_by_compressed_tensors,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in found:
            tiny = FAMILIES[family].variant(intermediate_size=64) if family == "gpt_oss" else FAMILIES[family]
            found[family] = Oracle(tiny).save(tmp_path_factory.mktemp(family))
        return found[family]

    return folder


def gpt_oss(source: Path, target: Path) -> tuple[Path, Path]:
    """Write gpt-oss with experts in four bits, and the same numbers in float32."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    small, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        # In full precision experts are [inputs, outputs], in four bits [outputs, inputs].
        small[name + "_blocks"], small[name + "_scales"], decoded = pack(small.pop(name).transpose(1, 2))
        wide[name] = decoded.transpose(1, 2)
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": listed}}
    for folder, content, more in ((target / "small", small, stated), (target / "wide", wide, {})):
        folder.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
    return target / "small", target / "wide"


def load(folder: Path, operations=PLAIN, dtype=torch.float32, **more):
    return load_model(folder, dtype, progress=False, operations=operations, **more)[0]


def answer(folder: Path, operations=PLAIN, dtype=torch.float32) -> torch.Tensor:
    runner = DirectRunner(load(folder, operations, dtype), operations=operations)
    [logits] = runner.step([(runner.open(random_tokens(90, seed=1)), 90)])
    return logits


def held_formats(model) -> set[type]:
    layers = [layer for layer in model.modules() if isinstance(layer, MatrixLayer)]
    return {type(part.format) for layer in layers for part in layer.stored_parts()}


def test_published_four_bit_experts_equal_the_same_in_full_precision(saved, tmp_path):
    small, wide = gpt_oss(saved("gpt_oss"), tmp_path)
    model = load(small)
    assert held_formats(model) == {Mxfp4}
    experts = model.model.layers[0].mlp.experts.weights
    assert [experts.first.bytes, experts.second.bytes] == [
        experts.first.experts * matrix.outputs * (matrix.inputs // 2 + matrix.inputs // 32)
        for matrix in (experts.first, experts.second)
    ]
    wanted = answer(wide)
    torch.testing.assert_close(answer(small), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer(small, CPU), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_parts_even_where_they_divide_blocks(saved, tmp_path, ranks):
    small, _ = gpt_oss(saved("gpt_oss"), tmp_path)
    whole = load(small).model.layers[1].mlp.experts.weights
    first, second = whole.first.decode().unflatten(1, (2, -1)), whole.second.decode()
    parts = [load(small, shard=Shard(rank, ranks)).model.layers[1].mlp.experts.weights for rank in range(ranks)]
    assert torch.equal(torch.cat([part.first.decode().unflatten(1, (2, -1)) for part in parts], 2), first)
    assert torch.equal(torch.cat([part.second.decode() for part in parts], 2), second)
    assert all(isinstance(part.first.format, Mxfp4) for part in parts)
    assert all(isinstance(part.second.format, Mxfp4) == (ranks == 2) for part in parts)
    spread = [load(small, shard=Shard(rank, ranks, True)).model.layers[1].mlp.experts.weights for rank in range(ranks)]
    assert torch.equal(torch.cat([part.second.decode() for part in spread]), second)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "llama", "lfm2"])
def test_packed_linears_and_experts_are_read(family, saved, tmp_path):
    small, wide = quantise(saved(family), tmp_path, COMPRESSED, 32)
    assert Mxfp4 in held_formats(load(small))
    wanted = answer(wide)
    torch.testing.assert_close(answer(small), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer(small, CPU), wanted, rtol=1e-4, atol=1e-4)


def test_scales_of_another_shape_are_refused_by_name(saved, tmp_path):
    small, _ = gpt_oss(saved("gpt_oss"), tmp_path)
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ModelError, match=r"misshapen: .*down_proj_blocks: codes have shape") as error:
        load(small)
    assert "\n" not in str(error.value)


# The format alone ----------------------------------------------------------------------------------------------------


def stored(*shape: int, seed: int = 0) -> tuple[Stored, torch.Tensor]:
    codes, scales, decoded = pack(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return Stored(Mxfp4(), (codes.flatten(-2), scales), *shape[-2:]), decoded


def test_every_code_and_every_power_is_decoded():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[::2] | (codes[1::2] << 4)).expand(254, 16)
    scales = torch.arange(254, dtype=torch.uint8).unsqueeze(1)
    found = Stored(Mxfp4(), (packed, scales), 254, 32).decode()
    wanted = NUMBERS.repeat(2).double() * torch.arange(254).double().sub(127).exp2().unsqueeze(1)
    # The greatest powers are beyond float32.
    torch.testing.assert_close(found[:252].double(), wanted[:252], rtol=0, atol=1e-44)


def test_numbers_that_four_bits_can_say_are_encoded_exactly():
    one, decoded = stored(3, 6, 64)
    assert torch.equal(one.decode(), decoded)
    assert torch.equal(Mxfp4().encode(decoded).decode(), decoded)
    assert not Mxfp4().encode(torch.zeros(2, 32)).decode().any()


def test_rows_go_anywhere_and_columns_only_in_blocks():
    one, decoded = stored(10, 128)
    index = torch.randperm(10)
    assert torch.equal(one.format.rows(one, index).decode(), decoded[index])
    assert torch.equal(one.format.cut_rows(one, 3, 7).decode(), decoded[3:7])
    assert torch.equal(one.format.cut_columns(one, 32, 96).decode(), decoded[:, 32:96])
    assert one.format.cut_columns(one, 16, 64) is None
    assert one.format.scaled(one, 0.7) is None
    other, more = stored(4, 128, seed=1)
    assert torch.equal(one.format.stacked([one, other]).decode(), torch.cat([decoded, more]))
    beside, columns = stored(10, 32, seed=2)
    assert torch.equal(one.format.abreast([one, beside]).decode(), torch.cat([decoded, columns], 1))


@pytest.mark.parametrize("rows", [1, 40])
def test_kernels_multiply_the_decoded_numbers(rows):
    one, _ = stored(90, 96)
    weight = Weight((one.to(DEVICE),), torch.randn(90, device=DEVICE))
    x = torch.randn(rows, 96, device=DEVICE)
    torch.testing.assert_close(multiply_stored(x, weight), PLAIN.linear(x, weight), rtol=1e-4, atol=1e-4)


def test_kernels_of_experts_equal_their_definition():
    (first, _), (second, _) = stored(5, 128, 96), stored(5, 96, 64, seed=1)
    biases = [torch.randn(5, size, device=DEVICE) for size in (128, 96)]
    layer = ExpertWeights(first.to(DEVICE), second.to(DEVICE), clamped(), *biases)
    x = torch.randn(21, 96, device=DEVICE) / 8
    weights, chosen = PLAIN.route_top(torch.randn(21, 5, device=DEVICE), 2)
    wanted = PLAIN.experts(x, (weights, chosen), layer)
    found = stored_experts(x, (weights.contiguous(), chosen.int().contiguous()), layer, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))
