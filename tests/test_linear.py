"""Products with weights: whichever routine is chosen, it is the same product."""

import pytest
import torch
import torch.nn.functional as F

from weft.kernels.linear import HANDFUL, WEIGHTS_FIRST_ROWS, linear

ROWS = (0, 1, 3, HANDFUL.start, 17, HANDFUL.stop - 1, HANDFUL.stop, WEIGHTS_FIRST_ROWS, WEIGHTS_FIRST_ROWS + 1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def product_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    assert found.dtype == x.dtype
    return float((found.double() - exact).abs().max()) if found.numel() else 0.0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows_gives_the_product(dtype, biased):
    weight = (torch.randn(72, 40) / 40**0.5).to(dtype)
    bias = torch.randn(72).to(dtype) if biased else None
    for rows in ROWS:
        x = torch.randn(rows, 40).to(dtype)
        assert product_error(linear(x, weight, bias), x, weight, bias) < 4 * TOLERANCE[dtype]


def test_inputs_may_be_parts_of_wider_tensors():
    weight = torch.randn(24, 16) / 4
    for rows in ROWS:
        x = torch.randn(rows, 48)[:, 16:32]
        assert product_error(linear(x, weight, None), x, weight, None) < 1e-5
