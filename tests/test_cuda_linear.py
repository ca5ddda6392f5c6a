"""Products of few rows with weights, whose inputs several programs share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiled import assert_compiles
from weft.kernels.cuda.linear import Cut, counters, cut, few_rows, suits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str, bias: bool = False) -> None:
    torch.manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + 16, device=device).to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    added = torch.randn(outputs, device=device).to(dtype) if bias else None
    for _ in range(3):
        found = few_rows(x, weight, added)
        wanted = F.linear(x.float(), weight.float(), None if added is None else added.float())
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
    assert not counters(x.device).any(), "a call leaves no count behind"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 512, 64), (3, 1040, 100), (17, 528, 64), (2, 64, 80), (2, 1152, 96)]
)
def test_rows_times_weights_is_the_plain_product(device, rows, inputs, outputs):
    check(rows, inputs, outputs, torch.float16, device, bias=rows == 3)


def check_activated(rows: int, inputs: int, outputs: int, parts: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows + inputs)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    found = few_rows(x, weight, None, "silu" if parts == 2 else "relu2", parts)
    product = F.linear(x.float(), weight.float())
    wanted = F.relu(product).square()
    if parts == 2:
        gate, up = product.chunk(2, -1)
        wanted = F.silu(gate) * up
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    assert not counters(x.device).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 2048, 64), (17, 1040, 100)])
def test_parts_of_a_product_add_up_to_it(device, rows, inputs, outputs, biased):
    # Triton's interpreter multiplies float16 right, bfloat16 not.
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    x, weight = (t.to(device, torch.float16) for t in (x, weight))
    bias = torch.randn(outputs, device=device, dtype=torch.float16) if biased else None
    parts = few_rows(x, weight, bias, summed=False)
    assert parts.ndim == 3
    assert len(parts) > 1
    torch.testing.assert_close(parts.sum(0).half(), few_rows(x, weight, bias), rtol=2e-3, atol=1e-4)
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(parts.sum(0), wanted, rtol=1e-2, atol=1e-2)
    assert not counters(x.device).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 512, 64), (3, 1040, 100), (17, 528, 192)])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_activation_behind_the_product_is_that_of_the_product(device, rows, inputs, outputs, parts):
    check_activated(rows, inputs, outputs, parts, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "parts"), [((2048, 16384), 2), ((4096, 24576), 2), ((4480, 15680), 1)])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_activated_layers_of_real_models_are_the_plain_product(rows, sizes, parts):
    check_activated(rows, *sizes, parts, torch.bfloat16, "cuda")


CUTS = [Cut(128, 1, 64, 4, 3), Cut(256, 1, 128, 8, 3), Cut(64, 2, 64, 4, 5), Cut(128, 4, 128, 8, 4)]


@pytest.mark.parametrize("by", CUTS)
@pytest.mark.parametrize("parts", [1, 2])
def test_however_a_product_is_cut_it_is_the_same(by, parts):
    x, weight = torch.randn(17, 1040), torch.randn(300, 1040) / 1040**0.5
    x, weight = x.half(), weight.half()
    name = "silu" if parts == 2 else None
    wanted = few_rows(x, weight, None, name, parts).float()
    torch.testing.assert_close(few_rows(x, weight, None, name, parts, by=by).float(), wanted, rtol=1e-2, atol=1e-2)
    unsummed = few_rows(x, weight, summed=False, by=by)
    assert unsummed.shape == ((by.shares, 17, 300) if by.shares > 1 else (17, 300))
    summed = unsummed.sum(0) if by.shares > 1 else unsummed.float()
    torch.testing.assert_close(summed, few_rows(x, weight).float(), rtol=1e-2, atol=1e-2)
    assert not counters(x.device).any()


def test_products_are_cut_so_that_the_memory_is_kept_busy():
    for outputs in range(64, 40000, 24):
        for rows in (1, 32):
            chosen = cut(rows, outputs, 4096)
            assert -(-outputs // chosen.width) * chosen.shares >= min(88, -(-outputs // 64) * 8)
            assert cut(rows, outputs, 4096, roomy=False).width == 64


def test_wide_programs_give_the_plain_product():
    check(17, 160, 12810, torch.float16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(2048, 2048), (8192, 2048), (1152, 1536), (2048, 16384), (4480, 22656), (15680, 4480), (10240, 4480)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 24, 32])
def test_layers_of_real_models_are_the_plain_product(rows, sizes):
    check(rows, *sizes, torch.bfloat16, "cuda")


def test_what_it_does_not_suit_is_left_to_the_library():
    weight = torch.zeros(64, 512, dtype=torch.bfloat16)
    assert suits(torch.zeros(4, 512, dtype=torch.bfloat16), weight)
    assert not suits(torch.zeros(33, 512, dtype=torch.bfloat16), weight)
    assert not suits(torch.zeros(4, 512), weight.float())
    assert not suits(torch.zeros(4, 512, dtype=torch.bfloat16), weight.t())


def launch_few_rows() -> None:
    for inputs, outputs in ((2048, 2048), (2048, 16384), (4480, 22656), (15680, 4480)):
        for rows in (1, 32):
            x, weight = (
                torch.empty(rows, inputs, dtype=torch.bfloat16),
                torch.empty(outputs, inputs, dtype=torch.bfloat16),
            )
            few_rows(x, weight)
            few_rows(x, weight, summed=False)
            few_rows(x, weight, torch.empty(outputs, dtype=torch.bfloat16))
            few_rows(x, weight, None, "silu", 2)
            few_rows(x, weight, None, "relu2", 1)


def test_kernels_compile_for_sm_90():
    assert_compiles(launch_few_rows)
