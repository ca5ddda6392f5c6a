"""Products with weights: whichever routine is chosen, it is the same product."""

import pytest
import torch
import torch.nn.functional as F

from weft.kernels.linear import HANDFUL, HAS_ONEDNN, WEIGHTS_FIRST_ROWS, linear, pack
from weft.kernels.native import library
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Addend, JoinedLinear, PackedLinear
from weft.models.model import pin
from weft.models.weights import copy

ROWS = (0, 1, 3, HANDFUL.start, 17, HANDFUL.stop - 1, HANDFUL.stop, WEIGHTS_FIRST_ROWS, WEIGHTS_FIRST_ROWS + 1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def product_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    assert found.dtype == x.dtype
    return float((found.double() - exact).abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows_gives_the_product_with_plain_and_with_packed_weights(dtype, biased):
    weight = (torch.randn(72, 40) / 40**0.5).to(dtype)
    bias = torch.randn(72).to(dtype) if biased else None
    for rows in ROWS:
        x = torch.randn(rows, 40).to(dtype)
        for form in (weight, pack(weight)):
            assert product_error(linear(x, form, bias), x, weight, bias) < 4 * TOLERANCE[dtype]


@pytest.mark.skipif(not library.available(), reason="no C++ compiler here")
@pytest.mark.parametrize("short", [True, False])
def test_weights_are_kept_twice_only_where_it_helps_and_only_if_asked_to(short):
    for dtype, helps in ((torch.float32, short), (torch.bfloat16, HAS_ONEDNN), (torch.float16, False)):
        layer = PackedLinear(32, {"q_proj": 8, "k_proj": 4}).to(dtype)
        layer.weight.copy_(torch.randn(12, 32).bfloat16() if short else torch.randn(12, 32))
        before = layer.weight
        layer.pack()
        assert layer.stored is None
        layer.weight = before
        layer.pack(twice=True)
        assert (layer.stored is not None) == helps
        if helps:
            assert torch.equal(layer.stored.float(), before.float())
            x = torch.randn(2, 32).to(dtype)
            assert product_error(layer(x), x, before, None) < 8 * TOLERANCE[dtype]


def test_inputs_may_be_parts_of_wider_tensors():
    weight = torch.randn(24, 16) / 4
    for rows in ROWS:
        x = torch.randn(rows, 48)[:, 16:32]
        for form in (weight, pack(weight)):
            assert product_error(linear(x, form, None), x, weight, None) < 1e-5


def test_packing_keeps_a_layers_products_and_parts():
    layer = PackedLinear(32, {"q_proj": 8, "k_proj": 4}).to(torch.bfloat16)
    layer.weight.normal_(std=0.2)
    plain, x = layer.weight.clone(), torch.randn(5, 32, dtype=torch.bfloat16)
    layer.pack()
    queries, keys = layer.split(x)
    assert product_error(torch.cat([queries, keys], -1), x, plain, None) < 2e-2
    assert layer.weight.shape == plain.shape


@pytest.mark.parametrize("biased", [(), ("o_proj",), ("mamba.out_proj", "o_proj")])
def test_a_joined_product_is_the_sum_of_its_addends_times_their_factors(biased):
    addends = {"mamba.out_proj": Addend(24, 0.8), "o_proj": Addend(16, 1.3), "third": Addend(8)}
    addends = {name: Addend(addend.inputs, addend.factor, name in biased) for name, addend in addends.items()}
    layer = JoinedLinear(addends, 40)
    stored = {f"block.{name}.weight": torch.randn(40, addend.inputs) for name, addend in addends.items()}
    stored |= {f"block.{name}.bias": torch.randn(40) for name in biased}
    used = []
    for source in layer.checkpoint_sources("block.out_proj."):
        names = (source.name, *source.companions)
        assert source.stored_shape == stored[source.name].shape
        copy(source, [stored[name] for name in names])
        used += names
    assert sorted(used) == sorted(stored)
    x = torch.randn(5, 48)
    wanted = torch.zeros(5, 40)
    for (name, addend), part in zip(addends.items(), x.split(layer.sizes, 1)):
        wanted += addend.factor * F.linear(part, stored[f"block.{name}.weight"], stored.get(f"block.{name}.bias"))
    for found in (layer(x), layer.unsummed(x)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_replaced_after_loading_is_the_one_in_use():
    layer = PackedLinear(32, {"q_proj": 8})
    pin(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(8, 32), requires_grad=False)
    assert not layer(torch.randn(1, 32)).any()


def test_a_tied_head_scores_with_the_embedding_and_leaves_it_for_look_ups():
    embedding = Embedding(50, 32).to(torch.bfloat16)
    embedding.weight.normal_(std=0.2)
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    for _ in range(2):
        assert product_error(embedding.scores(hidden), hidden, embedding.weight, None) < 2e-2
    assert torch.equal(embedding(torch.tensor([7])), embedding.weight[7:8])
