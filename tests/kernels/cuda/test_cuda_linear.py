"""Products with weights: one row, few whose inputs programs share, some and many with an activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda import linear as linear_module
from weft.kernels.cuda.launch.gpus import H200, described, gpu_of
from weft.kernels.cuda.linear import many as linear_many
from weft.kernels.cuda.linear import matmul, suits
from weft.kernels.cuda.linear import some as linear_some
from weft.kernels.cuda.linear.few import Cut, counters, cut, few_rows
from weft.kernels.cuda.linear.many import are_many, many_rows
from weft.kernels.cuda.linear.one import USUAL_LOADS, blocks, one_row
from weft.kernels.cuda.linear.some import are_parted, are_some, can_describe, rows_in_parts, some_rows
from weft.kernels.cuda.linear.tiles import tiled
from weft.kernels.cuda.linear.vectors import LOADS, Vectors
from weft.kernels.weight import Weight

# A GPU without the shared memory of a Hopper one.
SMALL = replace(H200, shared_memory=100 << 10)
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
    matmul = F.linear(x.float(), weight.float())
    wanted = F.relu(matmul).square()
    if parts == 2:
        gate, up = matmul.chunk(2, -1)
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


CUTS = [
    Cut(128, 1, 64, 4, 3), Cut(256, 1, 128, 8, 3), Cut(64, 2, 64, 4, 5), Cut(128, 4, 128, 8, 4),
    Cut(22, 1, 128, 4, 3, lines=64), Cut(58, 2, 64, 4, 3, lines=64),
]  # fmt: skip


@pytest.mark.kernels
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
        for rows in (2, 32):
            chosen = cut(rows, outputs, 4096)
            assert -(-outputs // chosen.width) * chosen.shares >= min(88, -(-outputs // 64) * 8)
            assert cut(rows, outputs, 4096, SMALL).width == 64


@pytest.mark.kernels
def test_wide_programs_give_the_plain_product():
    check(17, 160, 12810, torch.float16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(2048, 2048), (8192, 2048), (1152, 1536), (2048, 16384), (4480, 22656), (15680, 4480), (10240, 4480)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 24, 32])
def test_layers_of_real_models_are_the_plain_product(rows, sizes):
    check(rows, *sizes, torch.bfloat16, "cuda")


# A row --------------------------------------------------------------------------------------------------------------


def check_one(inputs: int, outputs: int, dtype: torch.dtype, device: str, by: Vectors | None = None) -> None:
    torch.manual_seed(inputs)
    x = torch.randn(1, inputs, device=device).to(dtype)
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    matmul = F.linear(x.float(), weight.float())
    for added, wanted in ((None, matmul), (bias, matmul + bias.float())):
        gate, up = wanted.chunk(2, -1)
        found = {
            "": (one_row(x, weight, added, by=by), wanted),
            "relu2": (one_row(x, weight, added, "relu2", by=by), F.relu(wanted).square()),
            "silu": (one_row(x, weight, added, "silu", 2, by=by), F.silu(gate) * up),
        }
        for mine, theirs in found.values():
            torch.testing.assert_close(mine.float(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", [None, Vectors(1, 1), Vectors(2, 2), Vectors(8, 1)])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 2), (1040, 22), (7000, 10)])
def test_one_row_times_weights_is_the_plain_product(device, inputs, outputs, by):
    """With more pieces than are loaded at once, too, and with outputs and inputs that fill none."""
    check_one(inputs, outputs, torch.float16, device, by)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 32), (2880, 5120), (4096, 24576), (3840, 30720), (15680, 4480)])
def test_one_row_of_a_real_model_is_the_plain_product(sizes):
    check_one(*sizes, torch.bfloat16, "cuda")


def test_a_program_has_no_more_loads_than_registers_for_them():
    for inputs in range(16, 30000, 16):
        for parts in (1, 2):
            chosen = blocks(4096, inputs, parts)
            assert chosen.rows == 1 or chosen.rows * parts * chosen.pieces(inputs) <= USUAL_LOADS
            assert chosen.rows * parts * chosen.at_once(parts * 2) <= LOADS


# Some rows -----------------------------------------------------------------------------------------------------------


def check_some(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str, apart: int = 0) -> None:
    torch.manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + apart, device=device).to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    assert can_describe(x, weight)
    for added in (None, bias):
        wanted = F.linear(x.float(), weight.float(), None if added is None else added.float())
        gate, up = wanted.chunk(2, -1)
        for parts, name, theirs in ((2, "silu", F.silu(gate) * up), (1, "relu2", F.relu(wanted).square())):
            mine = some_rows(x, weight, added, name, parts)
            torch.testing.assert_close(mine.float(), theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(33, 72, 40), (64, 128, 256), (65, 200, 300), (128, 64, 128)])
def test_activated_products_of_some_rows_are_those_of_the_plain_product(device, rows, inputs, outputs):
    check_some(rows, inputs, outputs, torch.float16, device, apart=8)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 16384), (4480, 15680)])
@pytest.mark.parametrize("rows", [40, 64, 80, 128])
def test_some_rows_of_a_real_model_are_the_plain_product(rows, sizes):
    check_some(rows, *sizes, torch.bfloat16, "cuda")


def check_parts(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    for bias in (None, torch.randn(outputs, device=device).to(dtype)):
        parts = rows_in_parts(x, weight, bias)
        assert parts.dtype == torch.float32
        assert parts.shape == (2, rows, outputs)
        wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        torch.testing.assert_close(parts.sum(0), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(65, 1160, 100), (128, 64, 128)])
def test_parts_of_some_rows_add_up_to_the_plain_product(device, rows, inputs, outputs):
    check_parts(rows, inputs, outputs, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [4096, 12288])
@pytest.mark.parametrize("rows", [80, 128])
def test_parts_of_a_real_model_add_up_to_the_plain_product(rows, inputs):
    check_parts(rows, inputs, 4096, torch.bfloat16, "cuda")


def check_many(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    for bias in (None, torch.randn(outputs, device=device).to(dtype)):
        wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        gate, up = wanted.chunk(2, -1)
        for parts, name, theirs in ((2, "silu", F.silu(gate) * up), (1, "relu2", F.relu(wanted).square())):
            mine = many_rows(x, weight, bias, name, parts)
            torch.testing.assert_close(mine.float(), theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(130, 72, 528), (256, 64, 256)])
def test_activated_products_of_many_rows_are_those_of_the_plain_product(
    device, rows, inputs, outputs, programs, monkeypatch
):
    # With two programs, each has several tiles.
    monkeypatch.setattr(linear_many, "gpu_of", lambda device: replace(H200, multiprocessors=programs))
    check_many(rows, inputs, outputs, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4096, 24576), (4480, 15680), (2048, 16384)])
@pytest.mark.parametrize("rows", [200, 512, 1000])
def test_many_rows_of_a_real_model_are_the_plain_product(rows, sizes):
    check_many(rows, *sizes, torch.bfloat16, "cuda")


def test_more_rows_than_a_program_has_are_refused():
    x, weight = torch.zeros(129, 64).half(), torch.zeros(128, 64).half()
    with pytest.raises(AssertionError):
        some_rows(x, weight, None, "silu", 2)
    with pytest.raises(AssertionError):
        rows_in_parts(x, weight, None)


def test_one_row_suits_more_outputs_than_several():
    weight = torch.zeros(30720, 16, dtype=torch.bfloat16)
    assert suits(torch.zeros(1, 16, dtype=torch.bfloat16), weight)
    assert not suits(torch.zeros(2, 16, dtype=torch.bfloat16), weight)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_any_number_of_rows_finds_its_way(rows):
    x, weight = torch.randn(rows, 144).half(), torch.randn(64, 144).half() / 12
    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    found = matmul(x, weight, None, "silu", 2)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2e-2, atol=2e-2)


def test_some_rows_suit_where_most_multiprocessors_have_a_program(monkeypatch):
    x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (128, 16384))
    assert not are_some(x, weight), "there is no such unit on a CPU"
    monkeypatch.setattr(linear_some, "is_able", lambda device: True)
    assert are_some(x, weight)
    assert suits(x, weight, activated=True)
    assert not suits(x, weight)
    assert not are_some(x[:32], weight)
    assert not are_some(torch.cat((x, x)), weight)
    assert not are_some(x.float(), weight.float())
    assert not are_some(x, weight[:4096])
    assert not are_some(x, torch.cat((weight, weight)))
    wider = torch.zeros(128, 65, dtype=torch.bfloat16)
    assert not are_some(wider[:, :64], weight), "lines begin anywhere"
    shifted = torch.zeros(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64)
    assert not are_some(shifted, weight), "the first line does not begin where it should"
    assert not are_some(torch.zeros(64, 128, dtype=torch.bfloat16).t(), weight), "lines lie across"
    monkeypatch.setattr(linear_some, "gpu_of", lambda device: SMALL)
    assert not are_some(x, weight)


def test_many_rows_suit_where_their_tiles_fill_the_gpu(monkeypatch):
    x, weight = (torch.empty(rows, 2048, dtype=torch.bfloat16) for rows in (2560, 24576))
    assert not are_many(x[:512], weight), "there is no such unit on a CPU"
    monkeypatch.setattr(linear_some, "is_able", lambda device: True)
    assert are_many(x[:512], weight)
    assert suits(x[:512], weight, activated=True)
    assert not suits(x[:512], weight)
    assert not are_many(x[:128], weight), "fewer have a kernel of their own"
    assert not are_many(x[:256], weight), "192 tiles are computed in the time of 264"
    assert not are_many(x[:400], weight), "most of the fourth tile would be empty"
    assert not are_many(x, weight), "more gain less"
    assert not are_many(x[:512, :1024], weight[:, :1024])
    assert not are_many(x[:512].float(), weight)
    assert not are_many(x[:512], weight[:-8]), "the second part would begin anywhere"
    monkeypatch.setattr(linear_some, "gpu_of", lambda device: SMALL)
    assert not are_many(x[:512], weight)


def test_parts_suit_where_most_multiprocessors_have_a_program(monkeypatch):
    x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (128, 4096))
    assert not are_parted(x, weight), "there is no such unit on a CPU"
    monkeypatch.setattr(linear_some, "is_able", lambda device: True)
    assert are_parted(x, weight)
    assert not are_parted(x[:64], weight)
    assert not are_parted(torch.cat((x, x)), weight)
    assert not are_parted(x, weight[:3072])
    assert not are_parted(x, torch.zeros(4480, 64, dtype=torch.bfloat16)), "some multiprocessors would run two"
    monkeypatch.setattr(linear_some, "gpu_of", lambda device: SMALL)
    assert not are_parted(x, weight)


# All ------------------------------------------------------------------------------------------------------------------


def test_what_it_does_not_suit_is_left_to_the_library():
    weight = torch.zeros(64, 512, dtype=torch.bfloat16)
    assert suits(torch.zeros(4, 512, dtype=torch.bfloat16), weight)
    assert not suits(torch.zeros(33, 512, dtype=torch.bfloat16), weight)
    assert not suits(torch.zeros(4, 512), weight.float())
    assert not suits(torch.zeros(4, 512, dtype=torch.bfloat16), weight.t())


# Inputs and outputs of matrices. The first ones, with odd widths among them, are compiled in every run of the tests.
FEW = [(4480, 22656), (2048, 2048), (2048, 16384), (15680, 4480)]
ONE = [(2048, 32), (15680, 4480), (2048, 16384), (2880, 5120), (4480, 22656), (28672, 64)]


def launch_few_rows(sizes: Sequence[tuple[int, int]] = FEW[:1]) -> None:
    for inputs, outputs in sizes:
        for rows in (2, 32):
            x, weight = (
                torch.empty(rows, inputs, dtype=torch.bfloat16),
                torch.empty(outputs, inputs, dtype=torch.bfloat16),
            )
            few_rows(x, weight)
            few_rows(x, weight, summed=False)
            few_rows(x, weight, torch.empty(outputs, dtype=torch.bfloat16))
            few_rows(x, weight, None, "silu", 2)
            few_rows(x, weight, None, "relu2", 1)


def launch_one_row(sizes: Sequence[tuple[int, int]] = ONE[:2]) -> None:
    for inputs, outputs in sizes:
        x, weight = torch.empty(1, inputs, dtype=torch.bfloat16), torch.empty(outputs, inputs, dtype=torch.bfloat16)
        one_row(x, weight)
        one_row(x, weight, torch.empty(outputs, dtype=torch.bfloat16))
        one_row(x, weight, None, "silu", 2)
        one_row(x, weight, None, "relu2", 1)


def launch_some_rows() -> None:
    for rows in (40, 128):
        for inputs, outputs in ((2048, 16384), (4480, 15680)):
            x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16) for size in (rows, outputs))
            some_rows(x, weight, None, "silu", 2)
            some_rows(x, weight, torch.empty(outputs, dtype=torch.bfloat16), "relu2", 1)
    for inputs in (4096, 12288):
        x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16) for size in (128, 4096))
        rows_in_parts(x, weight, None)


def launch_many_rows() -> None:
    x = torch.empty(512, 4096, dtype=torch.bfloat16)
    weight, bias = torch.empty(24576, 4096, dtype=torch.bfloat16), torch.empty(24576, dtype=torch.bfloat16)
    for added in (None, bias):
        many_rows(x, weight, added, "silu", 2)
        many_rows(x, weight, added, "relu2", 1)


def launch_few_rows_of_all_sizes() -> None:
    launch_few_rows(FEW)


def launch_one_row_of_all_sizes() -> None:
    launch_one_row(ONE)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_few_rows)
    assert_compiles(launch_one_row, launch_some_rows, launch_many_rows, in_registers=True)


@pytest.mark.slow
@pytest.mark.kernels
def test_kernels_of_all_sizes_compile_for_sm_90():
    assert_compiles(launch_few_rows_of_all_sizes)
    assert_compiles(launch_one_row_of_all_sizes, in_registers=True)


# GPUs -----------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_was_never_measured_is_what_it_says_of_itself():
    older = described(SimpleNamespace(major=8, minor=9, multi_processor_count=76, shared_memory_per_block_optin=101376))
    assert (older.multiprocessors, older.is_roomy, older.starts_early) == (76, False, False)
    newer = described(
        SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    )
    assert newer == H200
    assert gpu_of(torch.device("cpu")).multiprocessors == H200.multiprocessors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [33, 70])
def test_a_number_of_outputs_that_the_library_is_slow_with_is_multiplied_in_tiles(device, rows, monkeypatch):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator).to(device, torch.float16) for n in (rows, 49))
    called = []
    monkeypatch.setattr(linear_module, "tiled", lambda *inputs: (called.append(1), tiled(*inputs))[1])
    found = linear_module.linear(x, Weight.of(weight))
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)
    assert called
    assert not linear_module.is_uneven(x, weight[:48])
    assert not linear_module.is_uneven(x.float(), weight)
