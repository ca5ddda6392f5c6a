"""Operations of the exact package: no choice by rows changes a sum, and on a GPU no bit depends on company."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.exact import MODELS
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.cuda_attention import Scene
from tests.support.kernels.cuda_latent_attention import launch_by_head
from tests.support.models.cuda_engines import packaged
from tests.support.models.exact_steps import EXACT
from weft.base.errors import OptionError
from weft.device.store import AttentionView
from weft.kernels import choosing
from weft.kernels.activations import gelu_tanh, squared_relu
from weft.kernels.choosing import choose
from weft.kernels.cuda import gated_delta
from weft.kernels.cuda.attention import exact_decode
from weft.kernels.cuda.attention.exact_decode import RowSharing, sharing_of
from weft.kernels.cuda.launch.gpus import H200
from weft.kernels.cuda.linear import exact as exact_linear
from weft.kernels.cuda.linear.exact import cut, shares_of, unsplit, way_of
from weft.kernels.cuda.linear.few import INPUTS, Cut, few_rows
from weft.kernels.cuda.linear.tiles import Tile, float32_scores, tile_of, tile_of_shares, tiled
from weft.kernels.cuda.moe import exact as exact_moe
from weft.kernels.cuda.moe.choices import Tiles
from weft.kernels.cuda.moe.exact_few import few_experts
from weft.kernels.experts import ExpertWeights, SharedExpert, clamped, gated
from weft.kernels.plain import moe as plain_moe
from weft.kernels.recurrent import DeltaInputs
from weft.kernels.weight import Weight
from weft.models.config import text_part
from weft.models.layers.embedding import VocabularyHead
from weft.models.layers.linear import Linear
from weft.models.weights import build

HALVES = (torch.bfloat16, torch.float16)
AMPERE = replace(H200, shared_memory=163 << 10, starts_early=False, capability=(8, 0))
gpu = pytest.mark.gpu


# The choice ----------------------------------------------------------------------------------------------------------


def test_a_gpu_gets_exact_operations_by_name_and_with_reasons(monkeypatch):
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a GPU")
    chosen = choose("cuda:0", torch.bfloat16, lambda operations: (), exact=True)
    assert chosen.are_recorded
    assert chosen.operations.is_exact
    assert {choice.group for choice in chosen.choices if choice.package == "exact"} == set(choosing.EXACT)
    assert chosen.operations.linear is exact_linear.linear
    assert any("fixed order" in line for line in chosen.summary())
    usual = choose("cuda", torch.bfloat16, lambda operations: ())
    assert not usual.operations.is_exact


def test_exact_answers_are_refused_where_bits_would_depend_on_company(monkeypatch):
    with pytest.raises(OptionError, match="not available: the driver said no"):
        choose("cuda", torch.bfloat16, lambda operations: (), refused="the driver said no", exact=True)
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    with pytest.raises(OptionError, match=r"need dtype bfloat16 or float16.*this is float32"):
        choose("cuda", torch.float32, lambda operations: (), exact=True)


def test_no_number_of_rows_changes_how_a_sum_is_split():
    for outputs in (16, 100, 1089, 2048, 4480, 6144, 24576, 131072):
        for inputs, rows in product((512, 1000, 2880, 8192), range(1, 33)):
            for cut_here in (cut(rows, outputs, inputs), cut(rows, outputs, inputs, AMPERE)):
                assert cut_here.shares == shares_of(outputs, inputs)
                assert cut_here.shares == 1 or INPUTS % cut_here.inputs == 0, "shares would end elsewhere"
        assert shares_of(outputs, 8192) == 1 or {way_of(rows, outputs, 8192) for rows in ROWS} == {"few", "tiles"}
    for sizes in ((1089, 2048), (64, 2880), (4096, 20)):
        assert way_of(8192, *sizes) == "tiles", "nobody has compared the library there"
    assert {way_of(rows, 4096, 4096, AMPERE) for rows in range(1, 300)} == {"few", "tiles"}


@pytest.mark.parametrize("multiprocessors", [16, 78, 95, 96, 114, 132, 148])
def test_no_program_has_more_outputs_than_lines(multiprocessors):
    """On GPUs of the same kind with fewer multiprocessors, too; the others would never be computed."""
    gpu = replace(H200, multiprocessors=multiprocessors)
    for outputs, inputs, rows in product(range(16, 30000, 240), (512, 2048, 8192), (1, 16, 17, 32)):
        found = cut(rows, outputs, inputs, gpu)
        assert found.lines is None or found.width <= found.lines, (outputs, inputs, rows, found)


def test_a_row_is_shared_by_its_own_position():
    assert (sharing_of(8), sharing_of(2)) == (RowSharing(16, 2), RowSharing(32, 2))
    assert {sharing_of(heads).most for heads in (1, 2, 4, 8, 16, 64)} <= {8, 16, 32}


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_the_library_is_kept_from_splitting_only_inside(dtype):
    settings, name = torch.backends.cuda.matmul, exact_linear.REDUCTIONS[dtype]

    def now() -> tuple:
        library = torch.backends.cuda.preferred_blas_library()
        return getattr(settings, name), getattr(settings, f"{name}_split_k"), library

    before = now()
    with unsplit(dtype):
        assert now()[1] is False
    assert now() == before


def test_exact_operations_keep_to_the_signatures_of_the_interface():
    for group in choosing.EXACT:
        exact, usual = (import_module(choosing.module_of(group, package)) for package in ("exact", "cuda"))
        for name in choosing.GROUPS[group]:
            found, wanted = (list(inspect.signature(getattr(each, name)).parameters) for each in (exact, usual))
            assert found == wanted[: len(found)], name


# Products ------------------------------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 100, 144), (5, 64, 24), (40, 100, 144), (3, 40, 300)])
def test_every_way_to_multiply_gives_the_plain_product(device, rows, outputs, inputs):
    x = random(rows, inputs, dtype=torch.float16, device=device)
    weight = random(outputs, inputs, dtype=torch.float16, device=device, seed=1) / inputs**0.5
    bias = random(outputs, dtype=torch.float16, device=device, seed=2)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(EXACT.linear(x, Weight.of(weight, bias)).float(), wanted, rtol=1e-2, atol=1e-2)
    gate, up = wanted.chunk(2, -1)
    found = EXACT.activated_linear(x, Weight.of(weight, bias), F.silu, 2)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2e-2, atol=2e-2)
    # One line more than rows: nothing may be written behind them.
    for by in (Tile(16, 32, 64, 4, 2), Tile(32, 16, 32, 4, 1)):
        torch.testing.assert_close(tiled(x, weight, bias, by).float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.kernels
def test_shares_of_a_sum_are_added_in_order_by_every_kernel():
    """Within a share all sums are whole numbers; in any other order the large ones would not swallow the ones."""
    outputs, inputs, large = 40, 2048, 2.0**12
    x = torch.zeros(70, inputs, dtype=torch.float16)
    weight = torch.zeros(outputs, inputs, dtype=torch.float16)
    assert shares_of(outputs, inputs) == 4
    x[:, 0], x[:, 512], x[:, 1024], x[:, 1536], x[:, 2047] = large, 1, 1, -large, 3
    weight[:, 0] = weight[:, 1536] = large
    weight[:, 512] = weight[:, 1024] = weight[:, 2047] = 1
    # ((2^24 + 1) + 1) + (3 - 2^24) is 3 in float32.
    for rows in (1, 16, 20, 70):
        assert EXACT.linear(x[:rows], Weight.of(weight)).eq(3).all(), rows
        stream = EXACT.residual(torch.zeros(rows, outputs, dtype=torch.float16))
        stream.add(EXACT.linear_into_stream(x[:rows], Weight.of(weight)))
        assert stream.total().eq(3).all()
        stream.add(EXACT.linear_into_stream(x[:rows], Weight.of(weight)))
        stream.finish(SimpleNamespace(weight=torch.ones(outputs, dtype=torch.float16), eps=0.0))
        assert stream.x.eq(6).all()
    assert few_rows(x[:1], weight, by=Cut(64, 2, 128, 4, 2)).ne(3).all(), "another split would be seen"
    # Enough tiles for one program to compute all shares of a tile.
    many = tiled(x[:1].expand(176, -1), weight[:1].expand(192, -1), None, Tile(16, 16, 128, 4, 2), shares=4)
    assert many.eq(3).all()


@pytest.mark.parametrize("by", [Cut(22, 1, 128, 4, 2, lines=64), Cut(16, 1, 128, 2, 2), Tile(64, 32, 128, 4, 2)])
def test_unshared_sums_are_in_the_order_of_the_inputs(by):
    """As above, without shares: a program's steps of 128 inputs are the parts."""
    x = torch.zeros(20, 512, dtype=torch.float16)
    weight = torch.zeros(50, 512, dtype=torch.float16)
    x[:, 0], x[:, 128], x[:, 256], x[:, 384] = 2.0**12, 1, 1, -(2.0**12)
    weight[:, 0] = weight[:, 384] = 2.0**12
    weight[:, 128] = weight[:, 256] = 1
    multiply = few_rows if isinstance(by, Cut) else tiled
    assert multiply(x, weight, by=by).eq(0).all()
    shared = multiply(x, weight, by=by._replace(shares=2)) if isinstance(by, Cut) else tiled(x, weight, by=by, shares=2)
    assert shared.ne(0).all(), "another order would be seen"


def test_an_unordered_merge_would_be_seen():
    """Planted bug: whichever program is last adds the shares as they came."""
    x = random(1, 2048, dtype=torch.float16, device="cpu")
    weight = random(64, 2048, dtype=torch.float16, device="cpu", seed=1)
    parts = few_rows(x, weight, summed=False, by=cut(1, 64, 2048))
    sums = {order: sum(parts[list(order)], torch.zeros(1, 64)) for order in permutations(range(4))}
    assert any(not torch.equal(found, sums[0, 1, 2, 3]) for found in sums.values())
    assert torch.equal(EXACT.linear(x, Weight.of(weight)), sums[0, 1, 2, 3].half())


def test_scores_of_experts_are_float32_products():
    x, weight = random(5, 70, dtype=torch.bfloat16, device="cpu"), random(9, 70, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(float32_scores(x, weight), F.linear(x.float(), weight))


ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 100, 129, 256, 300, 511, 512, 700, 2048)
# The layers of the models whose cost is measured. Output heads have the form of the first size.
SIZES = [
    (65536, 2048), (100, 24), (64, 64),
    (6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (3072, 2048),
    (22656, 4480), (4480, 10240), (15680, 4480), (4480, 15680), (7168, 4480), (4480, 5120),
    (12352, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (10240, 4096),
    (12352, 2048), (2048, 4096), (1089, 2048), (2048, 512), (9216, 2048),
    (5120, 2880), (2880, 4096), (32, 2880),
]  # fmt: skip


def test_bits_are_compared_for_every_matmul_of_the_measured_models():
    for name in MODELS:
        model = build(text_part(packaged(name)), torch.bfloat16, "meta")
        layers = [each for each in model.modules() if isinstance(each, Linear) and not isinstance(each, VocabularyHead)]
        assert {tuple(each.weight.shape) for each in layers} <= {*SIZES}, name


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_of_a_matmul_has_the_same_bits_for_any_number_of_rows(outputs, inputs, dtype):
    x = random(max(ROWS), inputs, dtype=dtype, device="cuda")
    weight = random(outputs, inputs, dtype=dtype, device="cuda", seed=1) / inputs**0.5
    for bias in (None, random(outputs, dtype=dtype, device="cuda", seed=2)):
        wanted = EXACT.linear(x, Weight.of(weight, bias))
        for rows in ROWS:
            found = EXACT.linear(x[:rows], Weight.of(weight, bias))
            assert torch.equal(found, wanted[:rows]), f"{rows} rows, {'no ' if bias is None else ''}bias"
        last = EXACT.linear(x[-3:], Weight.of(weight, bias))
        assert torch.equal(last, wanted[-3:])


@gpu
@pytest.mark.parametrize(("function", "parts"), [(F.silu, 2), (gelu_tanh, 2), (squared_relu, 1)])
@pytest.mark.parametrize(("outputs", "inputs"), [(16384, 2048), (24576, 4096), (15680, 4480), (256, 64)])
def test_an_activation_after_a_matmul_has_the_same_bits_for_any_number_of_rows(outputs, inputs, function, parts):
    x = random(700, inputs, dtype=torch.bfloat16, device="cuda")
    weight = random(outputs, inputs, dtype=torch.bfloat16, device="cuda", seed=1) / inputs**0.5
    wanted = EXACT.activated_linear(x, Weight.of(weight), function, parts)
    for rows in ROWS[:-1]:
        assert torch.equal(EXACT.activated_linear(x[:rows], Weight.of(weight), function, parts), wanted[:rows]), rows


@gpu
@pytest.mark.parametrize("function", [F.silu, F.gelu, gelu_tanh, F.relu, squared_relu, torch.sigmoid])
def test_activations_inside_and_outside_a_matmul_agree_for_every_number(function):
    """All of bfloat16, multiplied by one."""
    every = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    weight = torch.zeros(len(every), 64, device="cuda", dtype=torch.bfloat16)
    weight[:, 0] = every
    x = torch.zeros(300, 64, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 1
    few, many = (EXACT.activated_linear(x[:rows], Weight.of(weight), function, 1) for rows in (1, 300))
    assert torch.equal(few[0].view(torch.int16), many[0].view(torch.int16))


@gpu
def test_a_split_chosen_by_rows_would_be_seen():
    x = random(64, 8192, dtype=torch.bfloat16, device="cuda")
    weight = random(2048, 8192, dtype=torch.bfloat16, device="cuda", seed=1) / 90
    split = few_rows(x[:8], weight, by=Cut(64, 2, 128, 4, 4))
    assert not torch.equal(split, EXACT.linear(x, Weight.of(weight))[:8])


# Experts -------------------------------------------------------------------------------------------------------------


def layer_of(count: int, hidden: int, inner: int, biased: bool, dtype: torch.dtype, device: str) -> ExpertWeights:
    activation = clamped() if biased else gated(F.silu)
    first = random(count, 2 * inner, hidden, dtype=dtype, device=device, seed=1) / hidden**0.5
    second = random(count, hidden, inner, dtype=dtype, device=device, seed=2) / inner**0.5
    biases = [
        random(count, size, dtype=dtype, device=device, seed=3) if biased else None for size in (2 * inner, hidden)
    ]
    return ExpertWeights.of(first, second, activation, *biases)


def shared_of(tokens: int, hidden: int, inner: int, dtype: torch.dtype, device: str) -> SharedExpert:
    wide = random(tokens, 2 * inner + 1, dtype=dtype, device=device, seed=7)
    opening, gate, up = wide.split([1, inner, inner], 1)
    return SharedExpert(gate, up, Weight.of(random(hidden, inner, dtype=dtype, device=device, seed=8) / 8), opening)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_those_of_the_reference(tokens, biased):
    layer = layer_of(8, 32, 16, biased, torch.float16, "cpu")
    x, logits = (
        random(tokens, 32, dtype=torch.float16, device="cpu"),
        random(tokens, 8, dtype=torch.float32, device="cpu"),
    )
    shared = None if biased else shared_of(tokens, 32, 16, torch.float16, "cpu")
    routing = plain_moe.route_softmax(logits, 2, renormalise=True)
    found = EXACT.experts(x, routing, layer, shared)
    wanted = plain_moe.experts(x, routing, layer, shared)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("own", [8, 48])
@pytest.mark.parametrize("by", [None, (Tiles(8, 16, 16, 4, 2, True), Tiles(8, 32, 16, 4, 2, True))])
def test_a_shared_expert_may_be_narrower_or_wider_than_the_others(own, by):
    layer = layer_of(8, 40, 24, False, torch.float16, "cpu")
    x, logits = (random(2, size, dtype=torch.float32, device="cpu", seed=5) for size in (40, 8))
    shared = shared_of(2, 40, own, torch.float16, "cpu")
    bias = random(40, dtype=torch.float16, device="cpu", seed=9)
    shared = replace(shared, second=replace(shared.second, bias=bias))
    weights, chosen = plain_moe.route_softmax(logits, 3, renormalise=True)
    found = few_experts(x.half(), weights, chosen, layer, shared, by)
    wanted = plain_moe.experts(x.half(), (weights, chosen), layer, shared)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("biased", [False, True])
def test_only_experts_of_the_best_groups_are_chosen(biased):
    logits = random(50, 24, dtype=torch.float32, device="cpu")
    bias = random(24, dtype=torch.float32, device="cpu", seed=3) if biased else None
    for groups, kept in ((4, 2), (6, 1), (3, 2)):
        options = {"bias": bias, "groups": groups, "kept_groups": kept, "scaling": 2.0}
        mine, theirs = (by.route_sigmoid(logits, 3, **options) for by in (EXACT, plain_moe))
        assert torch.equal(mine[1].sort(-1).values, theirs[1].int().sort(-1).values)
        torch.testing.assert_close(mine[0].sort(-1).values, theirs[0].sort(-1).values)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("count", "hidden", "inner", "k", "biased"),
    [(32, 2880, 2880, 4, True), (64, 2048, 512, 8, False), (8, 64, 32, 2, False)],
)
def test_a_token_of_a_mixture_has_the_same_bits_for_any_number_of_tokens(count, hidden, inner, k, biased, dtype):
    layer = layer_of(count, hidden, inner, biased, dtype, "cuda")
    x, logits = (
        random(1500, hidden, dtype=dtype, device="cuda"),
        random(1500, count, dtype=torch.float32, device="cuda"),
    )
    shared = shared_of(1500, hidden, 64, dtype, "cuda")

    def computed(tokens: int) -> torch.Tensor:
        part = SharedExpert(shared.gate[:tokens], shared.up[:tokens], shared.second, shared.opening[:tokens])
        return EXACT.experts(x[:tokens], EXACT.route_softmax(logits[:tokens], k, True), layer, part)

    wanted = computed(1500)
    for tokens in (1, 2, 5, 16, 33, 100, 256, 257, 1000, 1025):
        assert torch.equal(computed(tokens), wanted[:tokens]), tokens


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_experts_have_the_same_bits_for_any_number_of_tokens(dtype):
    x, weight = random(3000, 2688, dtype=dtype, device="cuda"), random(128, 2688, dtype=torch.float32, device="cuda")
    wanted = EXACT.score_experts(x, Weight.of(weight / 50))
    torch.testing.assert_close(wanted, (x.double() @ (weight / 50).double().T).float(), rtol=1e-4, atol=1e-4)
    for tokens in (1, 15, 16, 17, 200, 1025):
        assert torch.equal(EXACT.score_experts(x[:tokens], Weight.of(weight / 50)), wanted[:tokens])


# Attention -----------------------------------------------------------------------------------------------------------


def of_one_row(scene: Scene, row: int, operations=EXACT) -> torch.Tensor:
    """Return the row's outputs from a step that has only this row, on the scene's pages."""
    from tests.support.kernels.operations import attention
    from tests.support.kernels.plans import Row, make_plan
    from weft.runner.batching import build_batch

    start, end = scene.rows[row]
    first = sum(stop - begin for begin, stop in scene.rows[:row])
    part = slice(first, first + end - start)
    plan = scene.plan
    pages, window = plan.page_table[row].tolist(), plan.window_table[row].tolist()
    alone = make_plan([Row(start, end, pages=pages, window_pages=window, window_first=int(plan.window_first[row]))])
    batch = build_batch(
        alone, scene.spec, torch.zeros(9, dtype=torch.int64, device=scene.device), scene.device, operations
    )
    return attention(scene.q[part], scene.k[part], scene.v[part], batch, scene.view(), scene.scale, None, scene.sinks)


def of_all_rows(scene: Scene, operations=EXACT) -> list[torch.Tensor]:
    from tests.support.kernels.operations import attention

    batch = scene.batch(operations)
    found = attention(scene.q, scene.k, scene.v, batch, scene.view(), scene.scale, None, scene.sinks)
    return list(found.split([end - start for start, end in scene.rows]))


CROWD = [(15, 16), (0, 1), (100, 101), (70, 71), (0, 18), (32, 50)]


def differing(scene: Scene, operations=EXACT) -> list[int]:
    together = of_all_rows(scene, operations)
    return [row for row, mine in enumerate(together) if not torch.equal(mine, of_one_row(scene, row, operations))]


@pytest.mark.kernels
@pytest.mark.parametrize("window", [None, 40])
def test_attention_of_a_row_has_the_same_bits_beside_others(window):
    scene = Scene(CROWD, window=window, device="cpu")
    assert differing(scene) == []
    wanted = scene.reference(sinks=True)
    torch.testing.assert_close(torch.cat(of_all_rows(scene)), wanted, rtol=1e-4, atol=1e-4)


def differing_runs(scene: Scene, monkeypatch) -> list[int]:
    """Return the lengths of runs with which any row's bits change."""
    wanted, found = torch.cat(of_all_rows(scene)), []
    for run in (1, 4, 1000):
        monkeypatch.setattr(exact_decode, "run_of", lambda *sizes, run=run: run)
        if not torch.equal(torch.cat(of_all_rows(scene)), wanted):
            found.append(run)
    return found


@pytest.mark.kernels
@pytest.mark.parametrize("window", [None, 40])
def test_it_does_not_matter_how_many_shares_a_program_takes(window, monkeypatch):
    scene = Scene([(15, 16), (130, 131)], window=window, device="cpu")
    assert differing_runs(scene, monkeypatch) == []


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (256, 2), (256, 4)])
def test_attention_of_real_sizes_has_the_same_bits_beside_others(head_dim, kv_heads, window, dtype, monkeypatch):
    rows = [(position, position + 1) for position in (0, 63, 64, 255, 256, 700, 1023, 1024, 2500, *range(5, 400, 13))]
    rows += [(0, 64), (128, 300), (1024, 1500), (0, 7)]
    scene = Scene(rows, window, 4 * kv_heads, kv_heads, head_dim, 64, dtype, "cuda", head_dim**-0.5)
    assert differing(scene) == []
    assert differing_runs(scene, monkeypatch) == []


def test_shares_cut_from_the_batch_would_be_seen():
    """The usual operations divide the cells of all rows evenly."""
    from tests.support.kernels.operations import GPU

    assert differing(Scene(CROWD, device="cpu"), GPU)


def test_another_cut_of_a_row_would_be_seen(monkeypatch):
    scene = Scene(CROWD, device="cpu")
    wanted = of_one_row(scene, 2)
    monkeypatch.setattr(exact_decode, "sharing_of", lambda heads: RowSharing(8, 1))
    assert not torch.equal(of_one_row(scene, 2), wanted)


# Gated delta ----------------------------------------------------------------------------------------------------------


def test_no_number_of_rows_changes_how_tails_are_weighed(monkeypatch):
    seen = []
    monkeypatch.setattr(gated_delta, "check", lambda inputs, view: None)
    monkeypatch.setattr(gated_delta, "launch_decode", lambda *call: seen.append(call[-1]))
    for rows in (1, 32, 33, 200):
        v = torch.empty(rows, 1, 1)
        EXACT.gated_delta(DeltaInputs(v, v, v, v, v), SimpleNamespace(decodes=rows, rows=rows), None)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] is not None


# Compilation ---------------------------------------------------------------------------------------------------------


def launch_exact_products() -> None:
    deep = ((2048, 8192, 1), (4480, 15680, 1), (2048, 8192, 32), (10240, 4096, 1))
    for outputs, inputs, rows in (*deep, (1089, 2048, 1), (2048, 4096, 1), (2048, 4096, 32), (24576, 4096, 1)):
        weight, x = (torch.empty(size, inputs, dtype=torch.bfloat16) for size in (outputs, rows))
        few_rows(x, weight, by=cut(rows, outputs, inputs))
    weight, x = (torch.empty(size, 2048, dtype=torch.bfloat16) for size in (1089, 40))
    tiled(x, weight, None, tile_of(40, 1089))
    weight, x = (torch.empty(2048, 8192, dtype=torch.bfloat16) for _ in range(2))
    for rows in (40, 100, 2048):
        tiled(x[:rows], weight, None, tile_of_shares(rows), shares=4)
    float32_scores(torch.empty(8, 2688, dtype=torch.bfloat16), torch.empty(128, 2688))


def launch_exact_attention() -> None:
    scene = Scene([(300, 301), (64, 80)], dtype=torch.bfloat16, head_dim=128, heads=8, device="cpu", cell=64)
    store = torch.empty(40, 5, 64, 2, 128, dtype=torch.bfloat16)
    view = AttentionView(store[:, 1], store[:, 2], None)
    exact_decode.attend_decodes(scene.q.contiguous(), torch.empty_like(scene.q), scene.batch(), view, 0.1, None, None)


def launch_exact_experts() -> None:
    layer = layer_of(4, 128, 64, True, torch.bfloat16, "cpu")
    chosen = torch.zeros(1, 2, dtype=torch.int32)
    x, shared = torch.empty(1, 128, dtype=torch.bfloat16), shared_of(1, 128, 64, torch.bfloat16, "cpu")
    exact_moe.pair_results(x, chosen, layer)
    few_experts(x, torch.zeros(1, 2), chosen, layer, shared)


@pytest.mark.kernels
def test_exact_kernels_compile_for_sm_90():
    launches = (launch_exact_products, launch_exact_attention, launch_exact_experts, launch_by_head)
    assert_compiles(*launches, in_registers=True)
