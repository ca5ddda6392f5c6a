"""Routers and experts equal their definitions, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.moe import check_a_token_is_worth_the_same_in_any_company, random
from tests.support.kernels.operations import CPU, PLAIN, experts
from weft.kernels.activations import squared_relu
from weft.kernels.cpu.exact import prepare_experts
from weft.kernels.cpu.moe import route_sigmoid, route_softmax, route_top
from weft.kernels.experts import ExpertWeights, clamped, gated, plain
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library
from weft.kernels.native.stored import name_of


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_routing_takes_the_likeliest(renormalise):
    logits = random(9, 7)
    weights, chosen = route_softmax(logits, 3, renormalise)
    for token in range(9):
        likeliest = sorted(range(7), key=lambda e: -logits[token, e].item())[:3]
        assert chosen[token].tolist() == likeliest
        expected = logits[token].softmax(-1)[likeliest]
        torch.testing.assert_close(weights[token], expected / expected.sum() if renormalise else expected)


def test_softmax_over_the_best_equals_renormalised_softmax():
    logits = random(9, 7)
    torch.testing.assert_close(route_top(logits, 3), route_softmax(logits, 3, renormalise=True))


def test_a_bias_decides_who_is_chosen_and_not_how_much_they_weigh():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, chosen = route_sigmoid(logits, 2, bias=torch.tensor([-5.0, 0.0, 0.0, 5.0]), scaling=2.5)
    assert sorted(chosen[0].tolist()) == [1, 3]
    scores = logits[0, chosen[0]].sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())


def test_sigmoid_weights_are_left_alone_without_renormalisation():
    logits = random(4, 6)
    weights, chosen = route_sigmoid(logits, 2, renormalise=False)
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, chosen))


def test_only_experts_of_the_best_groups_are_chosen():
    # Group 1 has the single best expert, groups 0 and 2 the best pairs.
    logits = torch.tensor([[2.0, 2.0, 9.0, -9.0, 1.5, 1.5]])
    _, chosen = route_sigmoid(logits, 3, groups=3, kept_groups=2)
    assert sorted(chosen[0].tolist()) == [0, 1, 4] or sorted(chosen[0].tolist()) == [0, 1, 5]


ACTIVATIONS = {
    "gated silu": (gated(F.silu), lambda x: F.silu(x[: len(x) // 2]) * x[len(x) // 2 :], 2),
    "squared relu": (plain(squared_relu), lambda x: F.relu(x) ** 2, 1),
    "clamped swiglu": (
        clamped(),
        lambda x: (x[len(x) // 2 :].clamp(-7, 7) + 1) * (g := x[: len(x) // 2].clamp(max=7)) * torch.sigmoid(1.702 * g),
        2,
    ),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("operations", [CPU, PLAIN])
def test_experts_equal_their_definition(operations, tokens, name, biased):
    activation, defined, parts = ACTIVATIONS[name]
    count, hidden, inner, k = 5, 12, 7, 2
    first, second = random(count, parts * inner, hidden, seed=1) * 3, random(count, hidden, inner, seed=2)
    biases = (random(count, parts * inner, seed=3), random(count, hidden, seed=4)) if biased else (None, None)
    x, logits = random(tokens, hidden, seed=5), random(tokens, count, seed=6)
    # Expert 3 is never chosen.
    logits[:, 3] = -100
    weights, chosen = route_softmax(logits, k, renormalise=False)
    ours = experts(x, weights, chosen, first, second, activation, *biases, by=operations)
    for token in range(tokens):
        expected = torch.zeros(hidden)
        for weight, number in zip(weights[token], chosen[token].tolist()):
            outer = first[number] @ x[token] + (biases[0][number] if biased else 0)
            expected += weight * (second[number] @ defined(outer) + (biases[1][number] if biased else 0))
        torch.testing.assert_close(ours[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 50, 300])
@pytest.mark.parametrize("operations", [CPU, PLAIN])
def test_parts_of_the_experts_add_up_to_all(operations, tokens):
    """Each half leaves out what the other one holds."""
    first, second, x = random(6, 16, 8, seed=1), random(6, 8, 8, seed=2), random(tokens, 8, seed=3)
    weights, chosen = route_top(random(tokens, 6, seed=4), 3)
    chosen[0] = torch.tensor([0, 1, 2])
    together = experts(x, weights, chosen, first, second, gated(F.silu), by=operations)
    low = experts(x, weights, chosen, first[:3], second[:3], gated(F.silu), by=operations)
    high = experts(x, weights, chosen - 3, first[3:], second[3:], gated(F.silu), by=operations)
    torch.testing.assert_close(low + high, together, rtol=1e-4, atol=1e-5)
    assert not high[0].any()


def test_a_token_is_worth_the_same_in_any_company():
    check_a_token_is_worth_the_same_in_any_company()


UNPANELLED = next(each for each in BLOCK_TYPES.values() if name_of(each) is None)


@pytest.mark.skipif(not library.available(), reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [None, UNPANELLED], ids=["plain", "decoded"])
@pytest.mark.parametrize("k", [2, 3, 6])
def test_in_exact_mode_a_token_has_the_same_bits_in_any_company(k, format, dtype):
    """Of experts in panels, and of those in a format without a kernel, whose results PyTorch adds up.

    PyTorch has another routine for matrices as small as these.
    """
    hidden, inner, generator = 32, 256, torch.Generator().manual_seed(1)
    first = Stored.of(torch.randn(8, inner, hidden, generator=generator).to(dtype))
    if format is None:
        second = Stored.of(torch.randn(8, hidden, inner, generator=generator).to(dtype))
    else:
        # With these bytes, scales are moderate numbers.
        second = format.of(torch.randint(0, 64, (8, hidden, format.bytes), generator=generator).byte())
    layer = prepare_experts(ExpertWeights(first, second, plain(F.relu)), twice=False)
    x, routing = random(30, hidden, seed=3).to(dtype), route_top(random(30, 8, seed=4), k)
    together = CPU.experts(x, routing, layer, None)
    assert together.isfinite().all()
    for count in (1, 2, 3, 7, 16):
        for first in range(0, 30 - count, count):
            part = slice(first, first + count)
            found = CPU.experts(x[part], (routing[0][part], routing[1][part]), layer, None)
            assert torch.equal(found, together[part]), (count, first)
