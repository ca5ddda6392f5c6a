"""The product of few rows in C++ is the product, whatever the sizes, and a row does not see its company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operations import activated_linear, linear
from weft.kernels.activations import NAMES
from weft.kernels.cpu import linear as products
from weft.kernels.cpu.linear import FEW_ROWS, pack
from weft.kernels.native import library

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias=None):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_close(found, expected, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 16),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_sizes_give_the_product(dtype, rows, inputs, outputs, biased, threads):
    rows = min(rows, FEW_ROWS[dtype])
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs, inputs, seed=1) / inputs**0.5
    weight, bias = weight.to(dtype), random(outputs, dtype=dtype, seed=2) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_close(linear(x, weight, bias), exact(x, weight, bias), dtype)
    finally:
        torch.set_num_threads(before)


def test_weights_of_16_bits_give_the_same_floats_as_when_they_are_widened():
    weight = random(130, 77, dtype=torch.bfloat16, seed=1)
    for rows in (1, 2, 3, 5, FEW_ROWS[torch.float32]):
        x, bias = random(rows, 77), random(130, seed=2)
        assert torch.equal(linear(x, weight.float(), bias, stored=weight), linear(x, weight.float(), bias))


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_activations_are_torchs_own(activation, dtype, parts):
    x, weight, bias = random(3, 40, dtype=dtype) * 3, random(70, 40, dtype=dtype, seed=1) / 6, random(70, seed=2)
    bias = bias.to(dtype)
    product = exact(x, weight, bias)
    expected = activation(product) if parts == 1 else activation(product[:, :35]) * product[:, 35:]
    assert_close(activated_linear(x, weight, bias, activation, parts), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_its_company(dtype):
    weight = random(300, 77, dtype=dtype, seed=1)
    x = random(FEW_ROWS[dtype], 77, dtype=dtype)
    together = linear(x, weight)
    for row in range(len(x)):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])
    x[1:] = torch.nan
    assert torch.equal(linear(x, weight)[0], together[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype):
    wide, weight = random(3, 90, dtype=dtype), random(20, 31, dtype=dtype, seed=1) / 6
    assert_close(linear(wide[:, 40:71], weight), exact(wide[:, 40:71], weight), dtype)


def test_few_rows_read_weights_as_stored_and_many_rows_packed_ones(monkeypatch):
    weight = random(24, 16, dtype=torch.bfloat16) / 4
    packed, wrong = pack(weight), torch.full_like(weight, torch.nan)
    few, many = (random(rows, 16, dtype=torch.bfloat16) for rows in (FEW_ROWS[torch.bfloat16], 9))
    assert linear(few, packed, stored=wrong).isnan().all()
    assert_close(linear(many, packed, stored=wrong), exact(many, weight), torch.bfloat16)
    monkeypatch.setattr(products.native, "available", lambda: False)
    assert_close(linear(few, packed, stored=wrong if packed.is_mkldnn else weight), exact(few, weight), torch.bfloat16)
