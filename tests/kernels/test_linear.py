"""Products with weights: whichever routine is chosen, it is the same product."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.operations import CPU, ON_CPU
from weft.kernels.cpu.linear import FEW_ROWS, HAS_BFLOAT16, WEIGHTS_FIRST_ROWS, prepare
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library
from weft.kernels.native.layouts import BLOCKS_AND_PANELS, DENSE_AND_PANELS
from weft.kernels.weight import Weight
from weft.models.dummy import fill_randomly
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import JointLinear, Linear, PackedLinear, SummedLinear
from weft.models.model import pin
from weft.models.weights import copy

ROWS = (
    0,
    1,
    17,
    WEIGHTS_FIRST_ROWS,
    WEIGHTS_FIRST_ROWS + 1,
    *(most + more for most in FEW_ROWS.values() for more in (0, 1)),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def product_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    assert found.dtype == x.dtype
    return float((found.double() - exact).abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows_gives_the_product_with_plain_and_with_prepared_weights(dtype, biased):
    weight = (torch.randn(72, 40) / 40**0.5).to(dtype)
    bias = torch.randn(72).to(dtype) if biased else None
    plain = Weight.of(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, 40).to(dtype)
        for form in (plain, prepare(plain, twice=False), prepare(plain, twice=True)):
            assert product_error(CPU.linear(x, form), x, weight, bias) < 4 * TOLERANCE[dtype]


@pytest.mark.skipif(not library.available(), reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_are_kept_twice_only_where_it_helps_and_only_if_asked_to(dtype):
    layer = PackedLinear(32, {"q_proj": 8, "k_proj": 4}).to(dtype)
    layer.weight.copy_(torch.randn(12, 32))
    before = layer.weight
    helps = {torch.float32: True, torch.bfloat16: HAS_BFLOAT16, torch.float16: False}
    for twice in (False, True):
        layer.store("weight", (Stored.of(before),))
        layer.prepare(CPU, twice)
        kept_twice = layer.prepared.parts[0].format in (BLOCKS_AND_PANELS, DENSE_AND_PANELS)
        assert kept_twice == (twice and helps[dtype])
        x = torch.randn(2, 32).to(dtype)
        assert product_error(layer(x, ON_CPU), x, before, None) < 16 * TOLERANCE[dtype]


def test_inputs_may_be_parts_of_wider_tensors():
    weight = torch.randn(24, 16) / 4
    for rows in ROWS:
        x = torch.randn(rows, 48)[:, 16:32]
        for form in (Weight.of(weight), prepare(Weight.of(weight), twice=False)):
            assert product_error(CPU.linear(x, form), x, weight, None) < 1e-5


def test_packing_keeps_a_layers_products_and_parts():
    layer = PackedLinear(32, {"q_proj": 8, "k_proj": 4}).to(torch.bfloat16)
    layer.weight.normal_(std=0.2)
    plain, x = layer.weight.clone(), torch.randn(5, 32, dtype=torch.bfloat16)
    layer.prepare(CPU)
    queries, keys = layer.split(x, ON_CPU)
    assert product_error(torch.cat([queries, keys], -1), x, plain, None) < 2e-2


@pytest.mark.parametrize("biased", [(), ("o_proj",), ("mamba.out_proj", "o_proj")])
def test_a_summed_linear_is_the_sum_of_its_parts_times_their_factors(biased):
    inputs, factors = {"mamba.out_proj": 24, "o_proj": 16, "third": 8}, [0.8, 1.3, 1.0]
    layer = SummedLinear({name: Linear(size, 40, name in biased) for name, size in inputs.items()}, factors)
    stored = {f"block.{name}.weight": torch.randn(40, size) for name, size in inputs.items()}
    stored |= {f"block.{name}.bias": torch.randn(40) for name in biased}
    fill_from_parts(layer, stored)
    x = torch.randn(5, 48)
    wanted = torch.zeros(5, 40)
    for name, factor, part in zip(inputs, factors, x.split(layer.sizes, 1), strict=True):
        wanted += factor * F.linear(part, stored[f"block.{name}.weight"], stored.get(f"block.{name}.bias"))
    torch.testing.assert_close(layer(x, ON_CPU), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [(), ("qkv",), ("mamba.in_proj", "qkv")])
def test_a_joint_linear_gives_its_parts_side_by_side_packed_or_not(biased):
    outputs = {"qkv": 24, "mamba.in_proj": 20}
    layer = JointLinear({name: Linear(32, size, name in biased) for name, size in outputs.items()})
    stored = {f"block.{name}.weight": torch.randn(size, 32) for name, size in outputs.items()}
    stored |= {f"block.{name}.bias": torch.randn(outputs[name]) for name in biased}
    fill_from_parts(layer, stored)
    x = torch.randn(5, 32)
    wanted = [F.linear(x, stored[f"block.{n}.weight"], stored.get(f"block.{n}.bias")) for n in outputs]
    for _ in range(2):
        torch.testing.assert_close(layer(x, ON_CPU), torch.cat(wanted, 1), rtol=1e-5, atol=1e-5)
        layer.prepare(CPU)


@pytest.mark.parametrize("biased", [(), ("qkv",)])
def test_random_weights_of_a_joint_linear_give_no_bias_to_a_part_without_one(biased):
    layer = JointLinear({name: Linear(32, 24, name in biased) for name in ("qkv", "in_proj")})
    fill_randomly(layer, seed=0)
    assert layer.weight.std() == pytest.approx(32**-0.5, rel=0.1)
    assert (layer.bias is None) == (not biased)
    if layer.bias is not None:
        assert layer.bias[:24].any()
        assert not layer.bias[24:].any()


def fill_from_parts(layer: Linear, stored: dict[str, torch.Tensor]) -> None:
    """Fill a layer called `block.layer` from the tensors of its parts, each of which must be used once."""
    used = []
    for source in layer.checkpoint_sources("block.layer."):
        names = (source.name, *source.companions)
        assert source.stored_shape == stored[source.name].shape
        copy(source, [stored[name] for name in names])
        used += names
    assert sorted(used) == sorted(stored)


def test_a_weight_that_is_replaced_after_loading_is_the_one_in_use():
    layer = PackedLinear(32, {"q_proj": 8})
    pin(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(8, 32), requires_grad=False)
    assert not layer(torch.randn(1, 32), ON_CPU).any()


def test_a_tied_head_scores_with_the_embedding_and_leaves_it_for_look_ups():
    embedding = Embedding(50, 32).to(torch.bfloat16)
    embedding.weight.normal_(std=0.2)
    embedding.tied = True
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    for _ in range(2):
        assert product_error(embedding.scores(hidden, ON_CPU), hidden, embedding.weight, None) < 2e-2
        embedding.prepare(CPU)
    assert torch.equal(embedding(replace(ON_CPU, token_ids=torch.tensor([7]))), embedding.weight[7:8])
