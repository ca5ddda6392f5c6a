"""Experts and routers of a GPU equal their references: small ones anywhere, real sizes where there is a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import GPU, experts
from weft.kernels.activations import squared_relu
from weft.kernels.cuda.linear.vectors import Vectors
from weft.kernels.cuda.moe import few as moe_few
from weft.kernels.cuda.moe import many as moe_many
from weft.kernels.cuda.moe import routing as moe_routing
from weft.kernels.cuda.moe import some as moe_some
from weft.kernels.cuda.moe import sums as moe_sum
from weft.kernels.cuda.moe.choices import Tiles, last_tokens, tiles
from weft.kernels.cuda.moe.few import few_experts
from weft.kernels.cuda.moe.many import many_experts
from weft.kernels.cuda.moe.routing import list_pairs, route
from weft.kernels.cuda.moe.some import some_experts
from weft.kernels.experts import SharedExpert, clamped, gated, plain
from weft.kernels.plain import moe as reference
from weft.kernels.weight import Weight

on_gpu = partial(experts, by=GPU)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = {
    "silu": gated(F.silu),
    "gelu": gated(F.gelu),
    "relu2": plain(squared_relu),
    "clamped": clamped(1.5, 2.0),
}
WEIGHTS_FIRST = (Tiles(16, 64, 32, 4, 2, weights_first=True),) * 2
WAYS = {
    "few": lambda *inputs: few_experts(*inputs, (Vectors(8, 1), Vectors(8, 1))),
    "some": lambda *inputs: some_experts(*inputs, tiles(torch.float32, len(inputs[0]), 2, 4), tiled=False),
    "some, in tiles": lambda *inputs: some_experts(*inputs, WEIGHTS_FIRST, tiled=True),
    "many": many_experts,
}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def inputs_of(tokens, count, hidden, inner, k, activation, biased, dtype=torch.float32, shared=None):
    outer = activation.parts * inner
    first = random(count, outer, hidden, seed=1, dtype=dtype) / hidden**0.5
    second = random(count, hidden, inner, seed=2, dtype=dtype) / inner**0.5
    biases = (random(count, outer, seed=3, dtype=dtype), random(count, hidden, seed=4, dtype=dtype))
    logits = random(tokens, count, seed=6)
    # Expert 1 is never chosen, expert 2 by everybody.
    logits[:, 1], logits[:, 2] = -100, 100
    weights, chosen = (part.to(DEVICE) for part in reference.route_softmax(logits.cpu(), k, renormalise=True))
    x = random(tokens, hidden, seed=5, dtype=dtype)
    return x, weights * 2, chosen, first, second, activation, *(biases if biased else (None, None)), shared


def shared_expert(tokens, hidden, inner, opened, dtype=torch.float32):
    """Its first product is part of a wider one, so that rows are not contiguous."""
    wide = random(tokens, 2 * inner + 1, seed=7, dtype=dtype)
    second = random(hidden, inner, seed=8, dtype=dtype) / inner**0.5
    return SharedExpert(
        wide[:, 1 : inner + 1], wide[:, inner + 1 :], Weight.of(second), wide[:, :1] if opened else None
    )


def expected(x, weights, chosen, first, second, activation, first_bias, second_bias, shared):
    """By definition, in float64, one expert at a time: all of a real model's would take 6 GiB in that."""
    x, weights = x.double(), weights.double()
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        inner = x[token] @ first[expert].double().t()
        inner = activation(inner if first_bias is None else inner + first_bias[expert].double())
        outer = inner @ second[expert].double().t()
        outer = outer if second_bias is None else outer + second_bias[expert].double()
        total.index_add_(0, token, outer * weights[token, place, None])
    if shared is not None:
        parts = (shared.gate, shared.up, shared.second.matrix, shared.opening)
        gate, up, last, opening = (None if part is None else part.double() for part in parts)
        added = (F.silu(gate) * up) @ last.t()
        total += added if opening is None else added * opening.sigmoid()
    return total


def error(ours, wanted):
    return ((ours.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "inner", "k", "activation", "biased", "shared"),
    [
        (1, 5, 24, 40, 2, "silu", False, "added"),
        (3, 40, 72, 24, 4, "clamped", True, None),
        (21, 5, 40, 40, 3, "relu2", False, "opened"),
        (20, 6, 24, 24, 1, "gelu", True, None),
    ],
)
def test_every_way_equals_the_definition(way, tokens, count, hidden, inner, k, activation, biased, shared):
    shared = shared and shared_expert(tokens, hidden, 40, shared == "opened")
    inputs = inputs_of(tokens, count, hidden, inner, k, ACTIVATIONS[activation], biased, shared=shared)
    assert error(WAYS[way](*inputs), expected(*inputs)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "k", "activation", "biased", "shared"),
    [
        (1, 3, "silu", False, "opened"),
        (2, 3, "silu", True, "added"),
        (1, 1, "clamped", True, None),
        (2, 2, "relu2", True, "opened"),
    ],
)
def test_few_tokens_read_rows_in_several_pieces(tokens, k, activation, biased, shared, dtype):
    """Pieces are 256 and 512 columns, rows are taken by 64 and 32: neither divides the sizes."""
    hidden, inner = 530, 300
    shared = shared and shared_expert(tokens, hidden, 270, shared == "opened", dtype)
    inputs = inputs_of(tokens, 5, hidden, inner, k, ACTIVATIONS[activation], biased, dtype, shared)
    ours = few_experts(*inputs, (Vectors(64, 1), Vectors(32, 2)))
    assert error(ours, expected(*inputs)) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_a_token_is_worth_the_same_in_any_company():
    inputs = inputs_of(40, 6, 24, 16, 3, ACTIVATIONS["silu"], False)
    x, weights, chosen, *rest = inputs
    together = on_gpu(*inputs)
    for token in (0, 39):
        part = slice(token, token + 1)
        torch.testing.assert_close(on_gpu(x[part], weights[part], chosen[part], *rest)[0], together[token])


def test_no_tokens_are_no_work():
    inputs = inputs_of(2, 4, 16, 16, 2, ACTIVATIONS["silu"], False)
    none = on_gpu(inputs[0][:0], inputs[1][:0], inputs[2][:0], *inputs[3:])
    assert none.shape == (0, 16)


def test_pairs_are_listed_by_expert():
    # More pairs than a program looks at in one go.
    tokens, count, k = 3000, 7, 3
    chosen = random(tokens, count, seed=8).topk(k, -1).indices
    lists = list_pairs(chosen, count, tile=16)
    listed, sizes, places = lists.listed, lists.sizes, lists.places
    assert lists.tile_ends.tolist() == ((sizes.cpu() + 15) // 16).cumsum(0).tolist()
    flat = chosen.flatten().cpu()
    for expert in range(count):
        pairs = (flat == expert).nonzero().flatten()
        assert sizes[expert] == len(pairs)
        assert listed[expert, : len(pairs)].tolist() == pairs.tolist()
        assert places.flatten().cpu()[pairs].tolist() == list(range(len(pairs)))


ROUTERS = {
    "softmax": ({"renormalise": False}, lambda x, k: reference.route_softmax(x, k, renormalise=False)),
    "top": ({"renormalise": True}, reference.route_top),
    "sigmoid": (
        {"scaling": 2.5, "eps": 1e-6, "bias": True},
        lambda x, k: reference.route_sigmoid(x, k, random(x.shape[1], seed=9).cpu(), scaling=2.5, eps=1e-6),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("count", "k"), [(5, 2), (32, 4), (40, 8), (72, 10), (256, 8)])
def test_routers_choose_as_their_references(name, count, k):
    options, defined = ROUTERS[name]
    # As part of a wider product, so that rows are not contiguous.
    logits = random(9, count + 3, seed=7)[:, :count]
    bias = random(count, seed=9) if options.get("bias") else None
    kind = "sigmoid" if name == "sigmoid" else "softmax"
    weights, chosen = route(logits, k, kind, **{**options, "bias": bias})
    wanted_weights, wanted = defined(logits.cpu(), k)
    assert chosen.tolist() == wanted.tolist()
    torch.testing.assert_close(weights.cpu(), wanted_weights)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_of_equals_the_first_are_chosen(kind):
    logits = torch.zeros(3, 70, device=DEVICE)
    logits[1, 33:], logits[2, 40] = 1, 2
    weights, chosen = route(logits, 5, kind)
    assert chosen.tolist() == [[0, 1, 2, 3, 4], [33, 34, 35, 36, 37], [40, 0, 1, 2, 3]]
    torch.testing.assert_close(weights[:2].cpu(), torch.full((2, 5), 0.2))


def test_a_bias_has_a_say_in_who_is_chosen_but_no_weight():
    logits, bias = random(1, 9), torch.zeros(9, device=DEVICE)
    bias[4], bias[7] = -5, 5
    weights, chosen = route(logits, 8, "sigmoid", bias, renormalise=False)
    assert chosen[0, 0] == 7
    assert 4 not in chosen
    torch.testing.assert_close(weights[0], logits[0].sigmoid()[chosen[0].long()])


def test_a_row_that_is_not_numbers_chooses_different_experts():
    logits = random(2, 6)
    logits[0] = float("nan")
    for kind in ("softmax", "sigmoid"):
        for k in (3, 6):
            chosen = route(logits, k, kind)[1]
            assert all(len(set(row)) == k and 0 <= min(row) <= max(row) < 6 for row in chosen.tolist())


# Hidden, inner, choices: more than a thread can hold at once.
WIDE = [(1024, 2688, 22), (4096, 14336, 8), (12288, 4096, 2)]


def launch_wide_expert(hidden: int, inner: int, k: int, dtype: torch.dtype) -> None:
    first, second = (torch.empty(1, dtype=dtype).expand(64, *shape) for shape in ((2 * inner, hidden), (hidden, inner)))
    chosen = torch.zeros(1, k, dtype=torch.int32)
    x = torch.empty(1, hidden, dtype=dtype)
    on_gpu(x, torch.empty(1, k), chosen, first, second, ACTIVATIONS["silu"])


def launch_some_wide_experts() -> None:
    """Both matrices in turns, in both types; wide outputs are the quickest to compile."""
    launch_wide_expert(*WIDE[0], torch.float32)
    launch_wide_expert(*WIDE[2], torch.bfloat16)


def launch_wide_experts() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in WIDE:
            launch_wide_expert(*sizes, dtype)


@pytest.mark.kernels
def test_wide_experts_are_read_in_turns():
    assert_compiles(launch_some_wide_experts, in_registers=True)


class Recorded:
    """A kernel that only notes what it would be compiled for."""

    def __init__(self, name: str, launched: set[object]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        return lambda *groups, **constants: self.launched.add((self.name, *sorted(constants.items())))


@pytest.mark.parametrize(("k", "count"), [(4, 32), (10, 72), (3, 7)])
def test_prompts_of_a_few_lengths_launch_the_kernels_of_all_lengths(monkeypatch, k, count):
    """They are compiled ahead; see `expert_steps`."""
    launched: set[object] = set()
    for module in (moe_few, moe_many, moe_routing, moe_some, moe_sum):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorded(name, launched))
    most = 2 * last_tokens(k, count)[-1]
    monkeypatch.setattr(F, "grouped_mm", lambda rows, matrices, offs: rows.new_empty(len(rows), matrices.shape[2]))
    x, chosen = torch.empty(most, 8, dtype=torch.bfloat16), torch.zeros(most, k, dtype=torch.int32)
    matrices = (torch.empty(count, 16, 8, dtype=torch.bfloat16), torch.empty(count, 8, 8, dtype=torch.bfloat16))

    def launch(lengths) -> set[object]:
        launched.clear()
        for tokens in lengths:
            on_gpu(x[:tokens], torch.empty(tokens, k), chosen[:tokens], *matrices, ACTIVATIONS["silu"])
        return set(launched)

    ahead = launch([*last_tokens(k, count), most])
    assert launch(range(1, most)) == ahead
    assert launch([64, 128, 320, 576, most]) < ahead


@pytest.mark.slow
def test_wide_experts_of_any_shape_are_read_in_turns():
    assert_compiles(launch_wide_experts, in_registers=True)


def launch_real_sizes() -> None:
    for count, hidden, inner, k, activation, biased in (REAL["Qwen3.5-35B-A3B"], REAL["gpt-oss-20b"]):
        chosen = torch.zeros(300, k, dtype=torch.int32)
        outer = 2 * inner
        matrices = [
            torch.empty(1, dtype=torch.bfloat16).expand(count, *shape) for shape in ((outer, hidden), (hidden, inner))
        ]
        biases = [torch.empty(count, n, dtype=torch.bfloat16) if biased else None for n in (outer, hidden)]
        x = torch.empty(300, hidden, dtype=torch.bfloat16)
        route(torch.empty(300, count, dtype=torch.bfloat16), k, "softmax")
        for tokens in (1, 16, 128, 300):
            on_gpu(x[:tokens], torch.empty(tokens, k), chosen[:tokens], *matrices, ACTIVATIONS[activation], *biases)


def launch_float32() -> None:
    inputs = inputs_of(8, 4, 64, 64, 2, ACTIVATIONS["relu2"], True)
    WAYS["some"](*inputs)
    WAYS["few"](*inputs)
    shared = shared_expert(1, 2048, 512, opened=True, dtype=torch.bfloat16)
    on_gpu(*inputs_of(1, 4, 2048, 512, 2, ACTIVATIONS["silu"], False, torch.bfloat16, shared))


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_real_sizes, launch_float32)


REAL = {
    "LFM2-8B-A1B": (32, 2048, 1792, 4, "silu", False),
    "Qwen3.5-35B-A3B": (256, 2048, 512, 8, "silu", False),
    "Granite-4.0-H-Small": (72, 4096, 768, 10, "silu", False),
    "gpt-oss-20b": (32, 2880, 2880, 4, "clamped", True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300, 1500])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes_equal_the_definition_in_bfloat16(name, tokens):
    count, hidden, inner, k, activation, biased = REAL[name]
    inputs = inputs_of(tokens, count, hidden, inner, k, ACTIVATIONS[activation], biased, torch.bfloat16)
    assert error(on_gpu(*inputs), expected(*inputs)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 70, 900])
@pytest.mark.parametrize("inner", [512, 1536])
def test_a_shared_expert_is_added_in_bfloat16(tokens, inner):
    shared = shared_expert(tokens, 2048, inner, opened=inner == 512, dtype=torch.bfloat16)
    inputs = inputs_of(tokens, 64, 2048, 512, 8, ACTIVATIONS["silu"], False, torch.bfloat16, shared)
    assert error(on_gpu(*inputs), expected(*inputs)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_float32_is_float32(tokens):
    inputs = inputs_of(tokens, 32, 1024, 512, 4, ACTIVATIONS["silu"], False)
    assert error(on_gpu(*inputs), expected(*inputs)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_a_recorded_step_follows_other_choices(tokens):
    """Routing and experts as a graph, replayed on inputs that choose others."""
    count, hidden, inner, k = 64, 256, 128, 6
    x, _, _, first, second, activation, *_ = inputs_of(tokens, count, hidden, inner, k, ACTIVATIONS["silu"], False)
    logits = random(tokens, count, seed=10)

    def step():
        return on_gpu(x, *GPU.route_top(logits, k), first, second, activation)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (11, 12):
        x.copy_(random(tokens, hidden, seed=seed))
        logits.copy_(random(tokens, count, seed=seed + 10))
        graph.replay()
        torch.testing.assert_close(out, step(), rtol=0, atol=0)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    prepared = [inputs_of(tokens, 8, 128, 64, 2, ACTIVATIONS["silu"], False, torch.bfloat16) for tokens in (1, 50, 900)]
    for inputs in prepared:
        on_gpu(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in prepared:
            on_gpu(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
