"""Experts in C++ equal their plain definition, whatever the sizes, and a row has the same bits in every batch."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.operations import CPU, PLAIN
from weft.kernels.activations import NAMES
from weft.kernels.cpu import linear as products
from weft.kernels.cpu.linear import prepare
from weft.kernels.cpu.moe import FEW_EACH, prepare_experts
from weft.kernels.experts import ExpertWeights, SharedExpert, clamped, gated, plain
from weft.kernels.formats.stored import Stored
from weft.kernels.native import calls, library, moe
from weft.kernels.native.layouts import DENSE_AND_PANELS, as_panels, panels_of
from weft.kernels.native.linear import pack
from weft.kernels.native.moe import EXPERT_ACTIVATIONS, mix, route
from weft.kernels.weight import Weight
from weft.models.layers.moe import Experts
from weft.models.weights import prepare as prepare_model

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
# A narrow clamp, so that both limits are met.
ACTIVATIONS = [kind(function) for kind in (plain, gated) for function in NAMES] + [clamped(limit=0.5)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(count, hidden, inner, activation, biased, dtype=torch.float32):
    outer = inner * activation.parts
    first, second = (
        random(count, outer, hidden, seed=1) / hidden**0.5,
        random(count, hidden, inner, seed=2) / inner**0.5,
    )
    biases = (random(count, outer, dtype=dtype, seed=3), random(count, hidden, dtype=dtype, seed=4))
    return ExpertWeights.of(first.to(dtype), second.to(dtype), activation, *(biases if biased else (None, None)))


def in_panels(layer):
    first, second = (as_panels(each, pack(each.dense)) for each in (layer.first, layer.second))
    return replace(layer, first=first, second=second)


def widened(layer):
    biases = (None if bias is None else bias.float() for bias in (layer.first_bias, layer.second_bias))
    return ExpertWeights.of(layer.first.decode(), layer.second.decode(), layer.activation, *biases)


def assert_close(found, expected, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@contextmanager
def threads_of(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choices(rows, count, k, seed=5):
    return route(random(rows, count, seed=seed), k, sigmoid=False)


# Experts -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_sizes_give_the_weighted_sum(data):
    draw = data.draw
    dtype, activation = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(ACTIVATIONS))
    rows, count = draw(st.integers(1, 9) | st.integers(10, 64)), draw(st.integers(1, 9))
    hidden, inner = draw(st.integers(1, 80) | st.integers(250, 270)), draw(st.integers(1, 70))
    layer = make_layer(count, hidden, inner, activation, draw(st.booleans()), dtype)
    routing = choices(rows, count, draw(st.integers(1, count)))
    x = random(rows, hidden, dtype=dtype, seed=6)
    with threads_of(draw(st.integers(1, 3))):
        found = CPU.experts(x, routing, in_panels(layer))
    assert_close(found, PLAIN.experts(x.float(), routing, widened(layer)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: f"{activation.name} {activation.parts}")
def test_every_activation_equals_its_definition(activation, dtype):
    layer = make_layer(3, 40, 50, activation, True, dtype)
    for rows in (1, 2, 30):
        x, routing = random(rows, 40, dtype=dtype, seed=6), choices(rows, 3, 2)
        assert_close(mix(x, routing, in_panels(layer)), PLAIN.experts(x.float(), routing, widened(layer)), dtype)


def test_every_activation_of_experts_has_a_number():
    assert {activation.name for activation in ACTIVATIONS} == set(EXPERT_ACTIVATIONS) - {"none"}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_is_added_as_far_as_it_is_opened(dtype, opened):
    layer, second = make_layer(4, 40, 24, gated(F.silu), False, dtype), random(40, 33, dtype=dtype, seed=7) / 6
    for rows in (1, 20):
        x, routing = random(rows, 40, dtype=dtype, seed=6), choices(rows, 4, 2)
        # As columns of a wider matrix, where layers have them.
        opening, gate, up = random(rows, 67, dtype=dtype, seed=8).split_with_sizes([1, 33, 33], 1)
        shared = SharedExpert(
            gate, up, Weight((as_panels(Stored.of(second), pack(second)),)), opening if opened else None
        )
        wide = SharedExpert(gate.float(), up.float(), Weight.of(second.float()), opening.float() if opened else None)
        found = CPU.experts(x, routing, in_panels(layer), shared)
        assert_close(found, PLAIN.experts(x.float(), routing, widened(layer), wide), dtype)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(2, 64),
    count=st.integers(2, 12),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_a_row_has_the_same_bits_alone_and_in_company(dtype, rows, count, seed, threads):
    layer = in_panels(make_layer(count, 300, 45, gated(F.silu), True, dtype))
    x, routing = random(rows, 300, dtype=dtype, seed=seed), choices(rows, count, 2, seed)
    with threads_of(threads):
        together = mix(x, routing, layer)
    for row in {0, rows // 2, rows - 1}:
        part = slice(row, row + 1)
        alone = mix(x[part], (routing[0][part], routing[1][part]), layer)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_nan_stays_in_its_row(rows):
    layer = in_panels(make_layer(3, 40, 24, clamped(), True))
    x, logits = random(rows, 40, seed=6), random(rows, 3, seed=5)
    before = mix(x, route(logits, 2, sigmoid=False), layer)
    x[1], logits[1] = torch.nan, torch.nan
    after = mix(x, route(logits, 2, sigmoid=False), layer)
    assert after[1].isnan().all()
    others = torch.arange(rows) != 1
    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_experts_that_no_row_has_chosen_are_not_read(rows):
    layer = make_layer(5, 40, 24, gated(F.silu), True)
    weights, chosen = choices(rows, 3, 2)
    chosen = torch.tensor([0, 2, 3])[chosen]
    x, expected = random(rows, 40, seed=6), mix(random(rows, 40, seed=6), (weights, chosen), in_panels(layer))
    for unused in (1, 4):
        for values in (layer.first.dense, layer.second.dense, layer.first_bias, layer.second_bias):
            values[unused] = torch.nan
    assert torch.equal(mix(x, (weights, chosen), in_panels(layer)), expected)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_experts_of_other_ranks_add_nothing(rows):
    layer, x = make_layer(3, 40, 24, gated(F.silu), True), random(rows, 40, seed=6)
    weights, chosen = choices(rows, 9, 4)
    routing = weights, chosen - 3
    assert_close(mix(x, routing, in_panels(layer)), PLAIN.experts(x, routing, layer), torch.float32)


@pytest.mark.parametrize("rows", [1, 3, 4, 13, 64])
def test_all_rows_may_choose_one_expert(rows):
    layer, x = make_layer(6, 70, 40, gated(F.silu), True), random(rows, 70, seed=6)
    routing = torch.ones(rows, 1), torch.full((rows, 1), 5)
    assert_close(mix(x, routing, in_panels(layer)), PLAIN.experts(x, routing, layer), torch.float32)


def test_a_row_may_choose_an_expert_twice():
    layer, x = make_layer(3, 40, 24, gated(F.silu), True), random(64, 40, seed=6)
    routing = random(64, 4, seed=7), torch.tensor([1, 1, 0, 1]).expand(64, 4).contiguous()
    assert_close(mix(x, routing, in_panels(layer)), PLAIN.experts(x, routing, layer), torch.float32)


@pytest.mark.parametrize("short", ["first", "second"])
def test_one_matrix_may_have_16_bits_and_the_other_32(short):
    layer, x, routing = make_layer(3, 40, 24, gated(F.silu), True), random(9, 40, seed=6), choices(9, 3, 2)
    rounded = replace(layer, **{short: Stored.of(getattr(layer, short).dense.bfloat16().float())})
    prepared = prepare_experts(rounded, twice=True)
    assert getattr(prepared, short).tensors[0].dtype == torch.bfloat16
    assert {prepared.first.tensors[0].dtype, prepared.second.tensors[0].dtype} == set(DTYPES)
    assert_close(mix(x, routing, prepared), PLAIN.experts(x, routing, rounded), torch.float32)


def test_a_replayed_mixture_follows_the_new_choice():
    layer, x, logits = in_panels(make_layer(8, 40, 24, gated(F.silu), True)), random(20, 40, seed=6), random(20, 8)
    with calls.record(calls.RecordedMemory(1 << 20)) as recording:
        y = CPU.experts(x, CPU.route_top(logits, 3), layer)
    assert recording.pure
    program = recording.program()
    # First all rows have the same experts, then each its own.
    for changed in (torch.arange(8.0).expand(20, 8), random(20, 8, seed=9)):
        logits.copy_(changed)
        x.neg_()
        calls.replay(program)
        assert torch.equal(y, CPU.experts(x, CPU.route_top(logits, 3), layer))


def test_with_16_bit_units_panels_are_for_few_rows_of_each_expert(monkeypatch):
    monkeypatch.setattr(products, "HAS_BFLOAT16", True)
    layer = make_layer(4, 32, 16, gated(F.silu), False, torch.bfloat16)
    once, twice = prepare_experts(layer, twice=False), prepare_experts(layer, twice=True)
    assert once.first is layer.first
    assert twice.first.tensors[0] is layer.first.dense
    assert torch.equal(panels_of(twice.first), pack(layer.first.dense))
    assert torch.equal(panels_of(twice.second), pack(layer.second.dense))
    broken = (layer.first.dense, pack(layer.first.dense * torch.nan))
    wrong = replace(twice, first=replace(twice.first, tensors=broken))
    most = FEW_EACH[torch.bfloat16] * 4 // 2
    few, many = most, most + 1
    assert CPU.experts(random(few, 32, dtype=torch.bfloat16), choices(few, 4, 2), wrong).isnan().all()
    assert not CPU.experts(random(many, 32, dtype=torch.bfloat16), choices(many, 4, 2), wrong).isnan().any()


@pytest.mark.parametrize(("spare_bytes", "kept"), [(1 << 30, True), (0, False)])
def test_with_16_bit_units_panels_are_kept_where_memory_is_ample(monkeypatch, spare_bytes, kept):
    monkeypatch.setattr(products, "HAS_BFLOAT16", True)
    layer = Experts(3, 32, 16).bfloat16()
    prepare_model(layer, CPU, spare_bytes)
    assert (layer.weights.first.format is DENSE_AND_PANELS) == kept


def test_more_rows_than_the_kernels_serve_are_left_to_torch():
    layer, rows = make_layer(3, 40, 24, gated(F.silu), True), library.FEW_ROWS + 1
    x, logits = random(rows, 40, seed=6), random(rows, 3, seed=5)
    with calls.record(calls.RecordedMemory(1 << 20)) as recording:
        found = CPU.experts(x, CPU.route_top(logits, 2), in_panels(layer))
    assert not recording.pure
    assert_close(found, PLAIN.experts(x, PLAIN.route_top(logits, 2), layer), torch.float32)


# Routing -------------------------------------------------------------------------------------------------------------


def assert_same_routing(found, expected):
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)


def distinct_logits(rows, experts, dtype, seed):
    """Numbers far enough apart that no two are equal in 16 bits, nor their sigmoids; columns of a wider matrix."""
    values = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(seed + r)) for r in range(rows)]
    )
    wide = torch.full((rows, experts + 5), torch.nan)
    wide[:, 3 : 3 + experts] = (values - experts / 2) / 16
    return wide.to(dtype)[:, 3 : 3 + experts]


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 64),
    experts=st.integers(1, 80),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_routing_by_softmax_equals_its_definition(dtype, rows, experts, seed, data):
    logits, k = distinct_logits(rows, experts, dtype, seed), data.draw(st.integers(1, experts))
    renormalise = data.draw(st.booleans())
    found = CPU.route_softmax(logits, k, renormalise)
    assert found[0].dtype == torch.float32
    assert_same_routing(found, PLAIN.route_softmax(logits, k, renormalise))
    assert_same_routing(CPU.route_top(logits, k), PLAIN.route_top(logits, k))


@settings(max_examples=30, deadline=None)
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 64), seed=st.integers(0, 99), data=st.data())
def test_routing_by_sigmoid_equals_its_definition(dtype, rows, seed, data):
    draw = data.draw
    groups, size = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    kept, experts = draw(st.integers(1, groups)), groups * size
    logits, k = distinct_logits(rows, experts, dtype, seed), draw(st.integers(1, kept * size))
    bias = random(experts, seed=seed + 1) if draw(st.booleans()) else None
    options = {"renormalise": draw(st.booleans()), "scaling": draw(st.sampled_from([1.0, 2.5])), "eps": 1e-6}
    found = CPU.route_sigmoid(logits, k, bias, groups, kept, **options)
    assert_same_routing(found, PLAIN.route_sigmoid(logits, k, bias, groups, kept, **options))


def route_all(logits, k):
    return [CPU.route_softmax(logits, k, False), CPU.route_top(logits, k), CPU.route_sigmoid(logits, k)]


def test_of_equal_experts_the_first_is_chosen():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for weights, chosen in route_all(logits, 3):
        assert chosen.tolist() == [[1, 3, 0], [0, 1, 2]]
        assert weights[0, 0] == weights[0, 1] > weights[0, 2]
    _, chosen = CPU.route_sigmoid(torch.zeros(1, 8), 3, groups=4, kept_groups=2)
    assert chosen.tolist() == [[0, 1, 2]]


def test_nan_is_chosen_first_and_infinity_can_be_chosen():
    logits = torch.tensor([[1.0, torch.nan, 3.0, torch.nan], [1.0, torch.inf, -torch.inf, 0.0], [-torch.inf] * 4])
    for weights, chosen in route_all(logits, 3):
        assert chosen.tolist() == [[1, 3, 2], [1, 0, 3], [0, 1, 2]]
        assert weights[0].isnan().any()


def test_16_bit_rows_are_scored_in_float32():
    x, weight = random(7, 48, dtype=torch.bfloat16), random(10, 48, seed=1) / 7
    for matrix in (weight, weight.bfloat16().float()):
        expected = (x.double() @ matrix.double().T).float()
        assert (expected.bfloat16() - expected).abs().max() > 1e-3, "16 bits would not do"
        for rows in (1, 7):
            found = CPU.score_experts(x[:rows], prepare(Weight.of(matrix), twice=True))
            assert_close(found, expected[:rows], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_are_torchs_own(dtype):
    for size in (3, 16, 70):
        x, y = random(5, 2 * size, dtype=dtype).chunk(2, 1)
        assert torch.equal(CPU.add(x, y), x + y)


# Memory to work with -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_kernels_stay_within_the_memory_that_they_are_given(data):
    rows, count, groups = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    k, activation = data.draw(st.integers(1, count)), data.draw(st.sampled_from(ACTIVATIONS))
    layer = in_panels(
        make_layer(count * groups, data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70)), activation, True)
    )
    given_out: list[torch.Tensor] = []

    def guarded(size: int) -> torch.Tensor:
        """Return memory with a guard of known values after its end."""
        given_out.append(torch.full((size + 64,), 7.5))
        given_out[-1][:size] = torch.nan
        return given_out[-1][:size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "scratch", guarded)
        routing = route(random(rows, count * groups), k, data.draw(st.booleans()), groups=groups)
        mix(random(rows, layer.first.inputs), routing, layer)
    assert len(given_out) == 2
    assert all((each[-64:] == 7.5).all() for each in given_out)
