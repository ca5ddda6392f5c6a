"""Rows in FP8 (`--activations fp8`): the public recipe, matmuls with it in every package, and whole models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.quantised import FP8 as WRITTEN
from tests.support.models.quantised import quantise
from weft import LLM, SamplingParams
from weft.base.errors import InvalidOption
from weft.kernels.choosing import choose, rounding
from weft.kernels.cpu import embedding
from weft.kernels.experts import ExpertWeights, gated
from weft.kernels.formats import rounded
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.rounded import FP8, INTEGERS, ROUNDINGS, RoundedRows, in_fp8, takes_fp8
from weft.kernels.formats.stored import Stored
from weft.kernels.plain import moe as plain
from weft.kernels.weight import Weight
from weft.models.identity import revisions_of, rows_in
from weft.models.weights import load_model

EXACT = choose("cpu", torch.float32, lambda operations: (), exact=True).operations
PACKAGES = {"plain": PLAIN, "cpu": CPU, "exact": EXACT}
ROUNDED = {name: rounding(each, {FP8}) for name, each in PACKAGES.items()}
TIES = 2.0**-9
OTHERS = ("qwen3_5_moe", "qwen3_next", "nemotron_h", "lfm2", "lfm2_moe", "kimi_linear", "falcon_h1", "llama")


def e4m3(value: float) -> float:
    """Return the nearest e4m3, of two the even one, by its definition: three bits after the leading one."""
    if value == 0:
        return 0.0
    step = 2.0 ** max(math.floor(math.log2(abs(value))) - 3, -9)
    return round(value / step) * step


def one_by_one(row: torch.Tensor) -> torch.Tensor:
    """Return a row as vLLM's, SGLang's and DeepSeek's kernels round it, number by number."""
    found = torch.empty(len(row))
    for first in range(0, len(row), 128):
        block = row[first : first + 128].float()
        scale = torch.tensor(max(float(block.abs().max()), 1e-10)) * torch.tensor(1 / 448)
        for place, value in enumerate(block):
            code = e4m3(min(448.0, max(-448.0, float(value / scale))))
            found[first + place] = torch.tensor(code) * scale
    return found


def rows_of(inputs: int, rows: int = 6) -> torch.Tensor:
    """Rows of many sizes, with zeros, outliers and ties."""
    x = (
        torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs))
        * torch.logspace(-3, 3, rows)[:, None]
    )
    x[1] = 0
    x[2, :: max(1, inputs // 5)] *= 1000
    x[3] = torch.arange(inputs) * TIES
    return x


def matrix(outputs: int, inputs: int, rows: int, columns: int, *experts: int) -> Stored:
    plain = torch.randn(*experts, outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    return Fp8(rows, columns).encode(plain * inputs**-0.5)


@pytest.mark.parametrize("inputs", [1, 100, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_public_engines_round_them(inputs, dtype):
    x = rows_of(inputs).to(dtype)
    assert torch.equal(in_fp8(x), torch.stack([one_by_one(row) for row in x]))


def test_a_row_has_the_same_numbers_in_every_batch_and_what_is_no_number_shows_in_its_row_only():
    x = rows_of(300)
    whole = in_fp8(x)
    for row in range(len(x)):
        assert torch.equal(in_fp8(x[row : row + 1]), whole[row : row + 1])
    for wrong in (torch.nan, torch.inf):
        dirty = x.clone()
        dirty[4, 77] = wrong
        found = in_fp8(dirty)
        assert found[4, :128].isnan().all()
        assert torch.equal(found[[0, 1, 2, 3, 5]], whole[[0, 1, 2, 3, 5]])


def with_one_scale(x: torch.Tensor) -> torch.Tensor:
    """Planted: rows of a batch share their scales."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scales = blocks.abs().amax((0, -1), keepdim=True).clamp(min=1e-10) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[..., : x.shape[-1]]


@pytest.mark.parametrize("package", ["cpu", "exact"])
def test_a_product_is_the_same_in_every_batch_and_planted_scales_of_a_whole_batch_are_caught(package, monkeypatch):
    operations, x = ROUNDED[package], rows_of(256)
    weight = operations.prepare(Weight((matrix(64, 256, 128, 128),)), False)

    def is_same() -> bool:
        alone = torch.cat([operations.linear(x[row : row + 1], weight) for row in range(len(x))])
        return torch.equal(alone, operations.linear(x, weight))

    assert is_same()
    monkeypatch.setattr(rounded, "ROUNDINGS", {FP8: with_one_scale})
    assert not is_same()


@pytest.mark.parametrize(("form", "takes"), [((128, 128), True), ((1, 256), True), ((24, 40), True), ((1, 32), False)])
def test_blocks_and_channels_take_rows_in_fp8_and_mxfp8_does_not(form, takes):
    assert takes_fp8(matrix(48, 256, *form)) == takes
    assert not takes_fp8(Stored.of(torch.zeros(48, 256)))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("form", [(128, 128), (1, 300), (24, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rounded_rows(package, form, dtype):
    operations = ROUNDED[package]
    parts = (matrix(150, 300, *form), Stored.of(torch.randn(20, 300, dtype=dtype)))
    bias, x = torch.randn(170).to(dtype), rows_of(300).to(dtype)
    weight = operations.prepare(Weight(parts, bias), False)
    assert [part.format.rows_in for part in weight.parts] == [FP8, None]
    wide = x.double() @ parts[1].decode().double().T
    wanted = torch.cat([in_fp8(x).double() @ parts[0].decode().double().T, wide], -1) + bias.double()
    for rows in (0, 1, len(x)):
        found = operations.linear(x[:rows], weight)
        assert found.dtype == dtype
        most = (1e-5 if dtype == torch.float32 else 1e-2) * wanted[:rows].norm(dim=-1)
        assert bool(((found.double() - wanted[:rows]).norm(dim=-1) <= most + 1e-6).all())
    if package == "exact":
        assert torch.equal(operations.linear(x[3:4], weight), operations.linear(x, weight)[3:4])


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_are_those_of_rounded_rows(package, tokens):
    operations = ROUNDED[package]
    layer = ExpertWeights(matrix(128, 160, 64, 64, 6), matrix(160, 64, 64, 64, 6), gated(F.silu))
    x, routing = torch.randn(tokens, 160), plain.route_softmax(torch.randn(tokens, 6), 2, True)

    def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return in_fp8(x) @ weight.parts[0].decode().T

    wanted = plain.mixture(x, routing, layer, None, linear)
    prepared = operations.prepare_experts(layer, False)
    found = operations.experts(x, routing, prepared)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain.experts(x, routing, layer), rtol=1e-4, atol=1e-4)


def test_a_tied_table_in_panels_is_its_heads():
    table = matrix(70, 256, 128, 128)
    [head] = ROUNDED["cpu"].prepare(Weight((table,)), False).parts
    found = embedding.prepare_table(table, Weight((head,)))
    assert found.tensors[0] is head.tensors[0]
    assert found.format.rows_in is None
    cut = Weight((head,)).first(64)
    assert cut is None or isinstance(cut.parts[0].format, RoundedRows)


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints in FP8, by family and tool."""
    found: dict[tuple[str, str], Path] = {}

    def folder(family: str, tool: str = "blocks") -> Path:
        if (family, tool) not in found:
            place = tmp_path_factory.mktemp(family)
            found[family, tool], _ = quantise(Oracle(FAMILIES[family]).save(place / "full"), place, WRITTEN[tool])
        return found[family, tool]

    return folder


def answer(folder: Path, operations) -> tuple[torch.Tensor, str]:
    model, _ = load_model(folder, torch.float32, progress=False, operations=operations)
    runner = DirectRunner(model, operations=operations)
    [logits] = runner.step([(runner.open(random_tokens(90, seed=1)), 90)])
    return logits, revisions_of(model)


CHANNELS = "compressed-tensors, channels"


@pytest.mark.parametrize(
    ("family", "tool"),
    [
        ("qwen3_5", "blocks"),
        ("qwen3_5_moe", CHANNELS),
        *(pytest.param(name, "blocks", marks=pytest.mark.families) for name in OTHERS),
        *(pytest.param(name, CHANNELS, marks=pytest.mark.families) for name in ("qwen3_next", "nemotron_h", "lfm2")),
    ],
)
def test_models_compute_with_rounded_rows_in_every_package(family, tool, saved):
    folder = saved(family, tool)
    wanted, revisions = answer(folder, ROUNDED["plain"])
    for package in ("cpu", "exact"):
        found, same = answer(folder, ROUNDED[package])
        # A number beside the middle of two codes may become the other one.
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
        assert same == revisions
    wide, other = answer(folder, CPU)
    assert 0.001 < float((wide - wanted).norm() / wanted.norm()) < 0.5
    assert revisions == f"{other}, rows of fp8 1"


@pytest.mark.thorough
def test_the_option_decides_and_the_drafts_follow_it(saved):
    folder, settings = saved("qwen3_5"), {"memory": "32MiB", "threads": 1, "max_length": 256, "progress": False}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = {}
    for activations in ("auto", "wide", "fp8"):
        with LLM(str(folder), activations=activations, **settings) as llm:
            assert llm.config.revisions.endswith("rows of fp8 1") == (activations == "fp8")
            [found[activations]] = llm.generate([1, 2, 3], greedy, use_tqdm=False)
    first = {name: each.logprobs[0].logprob for name, each in found.items()}
    assert first["auto"] == first["wide"] != first["fp8"]


def test_integers_and_fp8_are_rounded_by_one_option():
    assert rounded.kinds_of("auto", "cpu") == {INTEGERS}
    assert not rounded.kinds_of("wide", "cpu")
    assert rounded.kinds_of("fp8", "cpu") == {INTEGERS, FP8}
    assert set(ROUNDINGS) == {INTEGERS, FP8}
    with pytest.raises(InvalidOption, match="activations must be one of auto, fp8, wide"):
        LLM("nowhere", activations="int8")


def test_a_checkpoint_without_fp8_is_computed_as_ever(tmp_path):
    folder = Oracle(FAMILIES["qwen3_5"]).save(tmp_path)
    model, _ = load_model(folder, torch.float32, progress=False, activations="fp8")
    assert not rows_in(model)
