"""Norms in C++ equal the references, whatever is added before them or gates them."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.activations import NAMES
from weft.kernels.cpu import norm
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.norm import gated_rms_norm, rms_norm
from weft.kernels.cpu.norm import join as add_and_norm
from weft.kernels.native import library
from weft.kernels.native.norm import BLOCK
from weft.kernels.stream import Change

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
SIZES = [(1, 768), (3, 33), (5, 1), (BLOCK, 16), (2 * BLOCK + 1, 40)]


def random(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def both(monkeypatch, function, *inputs):
    """What the kernel gives, and what the reference does."""
    found = function(*inputs)
    with monkeypatch.context() as patch:
        patch.setattr(norm.native, "available", lambda: False)
        return found, function(*inputs)


def assert_close(found, expected):
    # In bfloat16 a sum in another order may round to the neighbour.
    torch.testing.assert_close(found, expected, rtol=1e-5 if expected.dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_a_stream_is_added_to_and_normed(monkeypatch, dtype, weight_dtype, rows, size):
    x, change = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight, own = (random(size, dtype=weight_dtype, seed=seed) for seed in (2, 3))
    assert_close(*both(monkeypatch, rms_norm, x, weight, 1e-5))
    for changes in (
        [Change(change)],
        [Change(change, 0.25)],
        [Change(change, 0.25, own, 1e-4)],
        [Change(change), Change(x, 2.0, own, 1e-4)],
    ):
        found, expected = both(monkeypatch, add_and_norm, x, changes, weight, 1e-5)
        for ours, theirs in zip(found, expected):
            assert_close(ours, theirs)


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("exact_inputs", [True, False])
def test_gated_norms_in_groups_and_by_heads(monkeypatch, dtype, weight_dtype, gate_first, exact_inputs):
    wide = random(5, 200, dtype=dtype)
    gate, weight = wide[:, 70:130], random(60, dtype=weight_dtype, seed=1)
    x = random(5, 60, dtype=torch.float32 if exact_inputs else dtype, seed=2)
    for groups in (1, 3):
        assert_close(*both(monkeypatch, gated_rms_norm, x, gate, weight, 1e-5, groups, gate_first))
    heads = (x.view(5, 3, 20), gate.view(5, 3, 20), weight[:20])
    assert_close(*both(monkeypatch, gated_rms_norm, *heads, 1e-5, 1, gate_first))


@pytest.mark.parametrize("gate_first", [True, False])
def test_a_row_has_the_same_bits_in_any_company(gate_first):
    rows = 3 * BLOCK + 5
    x, gate, change = (random(rows, 60, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    weight = random(60, dtype=torch.bfloat16, seed=3)
    joined = add_and_norm(x, [Change(change)], weight, 1e-5)
    gated = gated_rms_norm(x, gate, weight, 1e-5, 3, gate_first)
    for row in (slice(0, 1), slice(BLOCK, BLOCK + 1), slice(rows - 1, rows)):
        for alone, among in zip(add_and_norm(x[row], [Change(change[row])], weight, 1e-5), joined):
            assert torch.equal(alone, among[row])
        assert torch.equal(gated_rms_norm(x[row], gate[row], weight, 1e-5, 3, gate_first), gated[row])


def test_nothing_of_the_input_is_changed():
    x, change, weight = random(2, 40), random(2, 40, seed=1), random(40, seed=2)
    before = x.clone(), change.clone()
    joined, _ = add_and_norm(x, [Change(change)], weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(change, before[1])
    torch.testing.assert_close(joined, x + change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", NAMES)
def test_gates_open_as_torch_opens_them(monkeypatch, dtype, activation):
    wide, x = random(5, 200, dtype=dtype), random(5, 90, dtype=dtype, seed=1)
    for gate, values in ((wide[:, 70:131], x[:, :61]), (wide[:1, :16], x[:1, 9:25])):
        assert_close(*both(monkeypatch, gated_product, gate, values, activation))


def test_mixed_dtypes_that_no_kernel_knows_are_left_to_torch(monkeypatch):
    x, weight = random(2, 40), random(40, dtype=torch.bfloat16, seed=1)
    assert_close(*both(monkeypatch, rms_norm, x, weight, 1e-5))
    changes = [Change(random(2, 40, seed=2))]
    found, expected = both(monkeypatch, add_and_norm, x.bfloat16(), changes, weight, 1e-5)
    assert found[0].dtype == expected[0].dtype
    for ours, theirs in zip(found, expected):
        assert_close(ours, theirs)
    assert_close(*both(monkeypatch, gated_rms_norm, x.bfloat16(), random(2, 40, seed=3), weight, 1e-5, 1, True))
