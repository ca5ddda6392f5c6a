"""Rows in FP8 on a GPU: codes as the definition has them, and products of codes for linears and experts."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda.formats import lines
from weft.kernels.cuda.formats.lines import CodeLines
from weft.kernels.cuda.linear import activated_linear, linear_into_stream, prepare, scaled
from weft.kernels.cuda.linear.packed import Division, multiply_packed
from weft.kernels.cuda.linear.rounding import LazyProduct, rows_in_fp8
from weft.kernels.cuda.linear.scaled import Scales, can_scale, multiply_scaled
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe import prepare_experts
from weft.kernels.cuda.moe.packed import can_pack, pair_results
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.cuda.norm import rows_of
from weft.kernels.experts import ExpertWeights, SharedExpert, gated
from weft.kernels.formats.fp8 import CODES, Fp8
from weft.kernels.formats.rounded import FP8, RoundedRows, in_fp8
from weft.kernels.formats.stored import Stored
from weft.kernels.plain import linear as plain_linear
from weft.kernels.plain import moe as plain
from weft.kernels.weight import Weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Forms, and whether there is a kernel for them.
FORMS = {"blocks": (128, 128), "channels": (1, 1 << 20), "one scale": (1 << 20, 1 << 20), "long blocks": (16, 256)}
ODD = {"odd blocks": (24, 40)}
ROWS = {FP8}


def matrix(kind: str, outputs: int, inputs: int, *experts: int, device: str = "cpu") -> Stored:
    torch.manual_seed(outputs + inputs)
    rows, columns = {**FORMS, **ODD}[kind]
    plain = torch.randn(*experts, outputs, inputs) * inputs**-0.5
    return Fp8(min(rows, outputs), min(columns, inputs)).encode(plain).to(device)


def rows_like(rows: int, inputs: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(rows)
    return (torch.randn(rows, inputs) * torch.logspace(-2, 2, rows)[:, None]).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inputs", [100, 832])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_definition(device, inputs, dtype):
    x = rows_like(37, inputs, device, dtype)
    x[3], x[4, :50], x[5, 7], x[6, 8] = 0, 1e-13, torch.nan, torch.inf
    codes, scales = rows_in_fp8(x)
    assert codes.shape == (37, scales.shape[1] * 128)
    found = (codes.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)[:, :inputs]
    broken = torch.tensor([row in (5, 6) for row in range(37)])
    assert torch.equal(found[~broken], in_fp8(x)[~broken])
    assert found[broken].isnan().any(-1).all()
    assert not codes.float()[:, inputs:].any()


def mantissas() -> torch.Tensor:
    return 1 + torch.arange(128) / 128


def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return x * y + z, rounded once: sums of these numbers fit into float64."""
    return (x.double() * y.double() + z.double()).float()


def test_a_quotient_of_bfloat16_is_exact_after_one_correction():
    """A power of two changes nothing, so the mantissas of a block's largest number and of others are all cases."""
    powers = torch.arange(24.0).exp2()[:, None, None]
    for largest in (mantissas(), torch.tensor([1e-10])):
        scale, value = (largest * (1 / 448))[:, None], largest.log2().floor().exp2().max() * mantissas() / powers
        inverse = 1 / scale
        first = value * inverse
        assert torch.equal(fused(fused(-first, scale, value), inverse, first), value / scale)
        assert not torch.equal(first, value / scale)


@pytest.mark.gpu
def test_all_quotients_of_bfloat16_have_the_codes_of_the_definition():
    powers, others = torch.arange(24.0).exp2(), mantissas()
    x = (others[None, None, :] / powers[:, None, None]).repeat(1, 128, 2)
    x[..., 0] = x[..., 255] = 2 * others
    x = x.flatten(0, 1).to("cuda", torch.bfloat16)
    codes, scales = rows_in_fp8(x)
    assert torch.equal((codes.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2), in_fp8(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 20, 140])
@pytest.mark.parametrize("kind", [*FORMS, *ODD])
def test_products_are_those_of_rounded_rows(device, rows, kind):
    part = matrix(kind, 150, 832 if kind != "odd blocks" else 640, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    other = torch.randn(24, part.inputs, device=device, dtype=dtype) * 0.05
    bias = torch.randn(174, device=device, dtype=dtype)
    weight = prepare(Weight((part, Stored.of(other)), bias), False, ROWS)
    assert isinstance(weight.parts[0].format, CodeLines if kind in FORMS else RoundedRows)
    x = rows_like(rows, part.inputs, device, dtype)
    wanted = torch.cat([in_fp8(x) @ part.decode().T, x.float() @ other.float().T], -1) + bias.float()
    found = multiply_stored(x, weight)
    error = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < (1e-2 if device == "cuda" else 1e-5)


def test_a_matrix_in_lines_is_the_matrix_and_may_be_cut():
    for kind in FORMS:
        part = matrix(kind, 150, 832)
        [found] = prepare(Weight((part,)), False, ROWS).parts
        assert torch.equal(found.decode(), part.decode())
        cut = found.format.cut_rows(found, 128 if kind == "blocks" else 16, 150)
        assert torch.equal(cut.decode(), part.decode()[-cut.outputs :])
    [blocks] = prepare(Weight((matrix("blocks", 150, 832),)), False, ROWS).parts
    assert blocks.format.cut_rows(blocks, 16, 150) is None


@pytest.mark.parametrize("parts", [1, 2])
def test_activations_and_shares_follow_the_products(parts):
    part, x = matrix("blocks", 128, 2048), rows_like(3, 2048)
    weight = prepare(Weight((part,)), False, ROWS)
    matmul = in_fp8(x) @ part.decode().T
    gate, up = matmul.chunk(2, -1) if parts == 2 else (matmul, 1.0)
    torch.testing.assert_close(activated_linear(x, weight, F.silu, parts), F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    shares = linear_into_stream(x, weight)
    assert shares.ndim == 3
    torch.testing.assert_close(shares.sum(0), matmul, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, pytest.param(40, marks=pytest.mark.kernels)])
@pytest.mark.parametrize("kinds", [("blocks", "channels"), ("odd blocks", "blocks")])
def test_experts_are_those_of_rounded_rows(tokens, kinds):
    first, second = matrix(kinds[0], 96, 320, 6), matrix(kinds[1], 320, 48, 6)
    layer = ExpertWeights(first, second, gated(F.silu))
    shared = SharedExpert(torch.randn(tokens, 32), torch.randn(tokens, 32), Weight.of(torch.randn(320, 32)), None)
    x = torch.randn(tokens, 320)
    routing = torch.rand(tokens, 2), torch.stack([torch.randperm(6)[:2] for _ in range(tokens)]).int()
    ready = prepare_experts(layer, False, ROWS)
    assert can_pack(ready) == (kinds[0] == "blocks")
    wanted = plain.experts(x, routing, plain.prepare_experts(layer, False, ROWS), shared)
    found = stored_experts(x, routing, ready, shared)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_gpus_without_such_tensor_cores_multiply_rounded_rows_by_other_kernels(monkeypatch):
    monkeypatch.setattr(lines, "CAPABILITY", (10, 0))
    part, x = matrix("blocks", 150, 256), rows_like(5, 256)
    [found] = prepare(Weight((part,)), False, ROWS).parts
    assert isinstance(found.format, RoundedRows)
    torch.testing.assert_close(multiply_stored(x, Weight((found,))), in_fp8(x) @ part.decode().T, rtol=1e-4, atol=1e-4)


def with_one_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Planted: a scale that the rows of a batch share."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(-1, (-1, 128))
    scales = (blocks.abs().amax((0, 2)) / 448).expand(len(x), -1).contiguous()
    return (blocks / scales.unsqueeze(-1)).to(CODES).flatten(-2), scales


def rows_alone_and_together(x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    by = Division(16, 64, 1, 4, 4, False)
    together = multiply_packed(x, weight.parts[0], by=by)
    return torch.cat([multiply_packed(x[row : row + 1], weight.parts[0], by=by) for row in range(len(x))]), together


def test_a_row_is_the_same_in_every_batch_and_a_planted_scale_of_a_whole_batch_is_caught(monkeypatch):
    x, weight = rows_like(4, 256), prepare(Weight((matrix("blocks", 64, 256),)), False, ROWS)
    alone, together = rows_alone_and_together(x, weight)
    assert torch.equal(alone, together)
    monkeypatch.setattr("weft.kernels.cuda.linear.packed.rows_in_fp8", with_one_scale)
    alone, together = rows_alone_and_together(x, weight)
    assert not torch.equal(alone, together)


# By the library ------------------------------------------------------------------------------------------------------


def by_addresses(codes, factors, weights, scales, out):
    """Multiply as the library does, which gets addresses of scales and knows where each one is."""
    held, steps, outputs = len(codes), codes.shape[1] // 128, len(weights)
    rows = floats_at(factors, held * steps).view(steps, held).t()
    if scales.kind is ScalingType.BlockWise1x128:
        own = floats_at(scales.tensor, outputs * steps).view(steps, outputs).t()
    else:
        fours, blocks = -(-steps // 4) * 4, -(-outputs // 128)
        own = floats_at(scales.tensor, blocks * fours).view(blocks, fours)[:, :steps]
        own = own.repeat_interleave(128, 0)[:outputs]
    values = (codes.float().unflatten(-1, (-1, 128)) * rows.unsqueeze(-1)).flatten(-2)
    matrix = (weights.float().unflatten(-1, (-1, 128)) * own.unsqueeze(-1)).flatten(-2)
    out.copy_(values @ matrix.T)


def floats_at(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers from the address of a tensor on; NaN where its memory ends."""
    memory = torch.empty(0).set_(tensor.untyped_storage())[tensor.storage_offset() :][:count]
    return F.pad(memory, (0, count - len(memory)), value=torch.nan)


@pytest.fixture
def library(monkeypatch):
    """A library on the CPU, from 20 rows on."""
    monkeypatch.setattr(scaled, "has_scales", lambda device: True)
    monkeypatch.setattr(scaled, "NARROW_ROWS", 20)
    calls: list[tuple[int, int]] = []

    def product(codes, factors, weights, scales, out):
        assert codes.is_contiguous()
        assert len(codes) % 16 == len(weights) % 16 == 0
        calls.append((len(codes), len(weights)))
        by_addresses(codes, factors, weights, scales, out)

    monkeypatch.setattr(scaled, "scaled_product", product)
    return calls


@pytest.mark.parametrize("rows", [20, 48])
@pytest.mark.parametrize(("kind", "inputs"), [("blocks", 640), ("blocks", 512), ("channels", 384), ("one scale", 384)])
def test_the_library_multiplies_many_rows_with_scales_in_its_own_order(library, rows, kind, inputs):
    part, other = matrix(kind, 176, inputs), matrix("blocks", 24, inputs)
    dense = torch.randn(8, inputs) * 0.05
    weight = prepare(Weight((part, other, Stored.of(dense)), torch.randn(208)), False, ROWS)
    x = rows_like(rows, inputs)
    wanted = torch.cat([in_fp8(x) @ each.decode().T for each in (part, other)], -1)
    wanted = torch.cat([wanted, x @ dense.T], -1) + weight.bias
    torch.testing.assert_close(multiply_stored(x, weight), wanted, rtol=1e-4, atol=1e-3)
    # Outputs that are no multiple of 16 are ours, as is exact mode.
    assert library == [(-(-rows // 16) * 16, 176)]
    multiply_stored(x[:19], weight)
    multiply_stored(x, weight, exact=True)
    assert len(library) == 1


def test_blocks_of_other_sizes_and_few_outputs_are_not_the_librarys(library):
    for kind, outputs in itertools.product(FORMS, (160, 112)):
        [part] = prepare(Weight((matrix(kind, outputs, 832),)), False, ROWS).parts
        assert can_scale(part) == (kind != "long blocks" and outputs == 160)


def test_activations_and_the_stream_follow_the_librarys_products(library):
    part, x = matrix("blocks", 128, 256), rows_like(21, 256)
    weight, matmul = prepare(Weight((part,)), False, ROWS), in_fp8(x) @ part.decode().T
    gate, up = matmul.chunk(2, -1)
    activated = activated_linear(x, weight, F.silu, 2)
    assert isinstance(activated, LazyProduct)
    torch.testing.assert_close(rows_of(activated), F.silu(gate) * up, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(linear_into_stream(x, weight), matmul, rtol=1e-4, atol=1e-3)
    assert library == [(32, 128)] * 2


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["silu", "relu2", "sigmoid"])
def test_the_next_matmul_computes_an_activation_while_it_rounds(library, name, parts):
    gate, up = rows_like(21, 200), rows_like(22, 200)[:21] if parts == 2 else None
    lazy, part = LazyProduct(name, gate, up), matrix("blocks", 128, 200)
    values = in_fp8(lazy.computed())
    codes, scales = rows_in_fp8(lazy)
    found = (codes.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)[:, :200]
    # A number beside the middle of two codes may become the other one.
    error = (found - values).abs()
    assert float((error > 1e-5 * values.abs()).float().mean()) < 1e-2
    for weight in (Weight((part,)), Weight((part, Stored.of(torch.zeros(8, 200))))):
        result = linear_into_stream(lazy, prepare(weight, False, ROWS))[:, :128]
        torch.testing.assert_close(result, values @ part.decode().T, rtol=1e-2, atol=1e-2 * float(values.max()))
    dense = part.decode()
    torch.testing.assert_close(linear_into_stream(lazy, Weight.of(dense)), lazy.computed() @ dense.T)
    assert library == [(32, 128)] * 2


def test_rows_for_the_library_have_the_same_codes_and_are_padded_with_zeros():
    x = rows_like(37, 300)
    codes, scales = rows_in_fp8(x)
    same, by_column = rows_in_fp8(x, by_column=True)
    assert by_column.stride() == (1, len(same)) == (1, 48)
    assert torch.equal(same[:37].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(by_column[:37], scales)
    assert not same[37:].float().any()
    assert by_column[37:].isfinite().all()


def unpadded(part: Stored) -> Scales:
    """Planted: scales of blocks without the columns that the library skips."""
    return Scales(ScalingType.BlockWise128x128, part.tensors[1].t())


def test_planted_scales_that_the_library_reads_from_other_places_are_caught(library, monkeypatch):
    part, x = matrix("blocks", 256, 640), rows_like(20, 640)
    [ready] = prepare(Weight((part,)), False, ROWS).parts

    def error() -> float:
        multiply_scaled(x, ready, None, found := torch.empty(20, 256))
        wanted = in_fp8(x) @ part.decode().T
        return float((found - wanted).norm() / wanted.norm())

    assert error() < 1e-5
    monkeypatch.setattr(scaled, "scales_of", unpadded)
    assert not error() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "channels"])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4480, 15680), (15680, 4480), (2880, 2880), (576, 1600), (144, 128), (128, 384), (4096, 4096)],
)
def test_the_library_of_a_gpu_multiplies_matrices_of_many_sizes(kind, outputs, inputs):
    if not scaled.has_scales(torch.device("cuda")):
        pytest.skip("the library has no scales for 128 inputs")
    part = matrix(kind, outputs, inputs, device="cuda")
    [ready] = prepare(Weight((part,)), False, ROWS).parts
    assert can_scale(ready)
    plain = part.decode()
    for rows in (1, 3, 16, 17, 100, 129, 512, 1000, 8192):
        sizes = torch.logspace(-2, 2, rows, device="cuda")[:, None]
        x = (torch.randn(rows, inputs, device="cuda") * sizes).bfloat16()
        wanted = in_fp8(x) @ plain.T
        # Whole, in columns of something wider, and of too few rows or at an odd address.
        wide = torch.full((-(-rows // 16) * 16, outputs + 24), torch.nan, device="cuda", dtype=torch.bfloat16)
        for out in (torch.empty_like(wide[:, :outputs]), wide[:, 8 : 8 + outputs], wide[:rows, 3 : 3 + outputs]):
            multiply_scaled(x, ready, None, out)
            error = (out[:rows].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert float(error.max()) < 1e-2, (rows, out.stride())
        assert wide[:, :3].isnan().all()
        assert wide[:, 8 + outputs :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "channels"])
@pytest.mark.parametrize(("outputs", "inputs"), [(4480, 1600), (2890, 2880), (640, 4096)])
def test_layers_of_many_sizes_are_those_of_rounded_rows(kind, outputs, inputs):
    part = matrix(kind, outputs, inputs, device="cuda")
    weight = prepare(Weight((part,)), False, ROWS)
    rounded = Weight((plain_linear.prepared(part, ROWS),))
    for rows in (1, 8, 9, 16, 24, 32, 64, 65, 128, 129, 512, 2048):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        found, wanted = multiply_stored(x, weight).float(), plain_linear.linear(x.float(), rounded)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-2


# Compiled -----------------------------------------------------------------------------------------------------------


def empty(kind: str, outputs: int, inputs: int, *experts: int) -> Stored:
    rows, columns = (min(pair) for pair in zip(FORMS[kind], (outputs, inputs), strict=True))
    codes = torch.zeros(*experts, outputs, inputs, dtype=torch.uint8).view(CODES)
    scales = torch.zeros(*experts, -(-outputs // rows), -(-inputs // columns))
    return lines.prepared(Stored(Fp8(rows, columns), (codes, scales), outputs, inputs), ROWS)


def launch_all() -> None:
    for kind, rows in itertools.product(("blocks", "channels"), (1, 16, 32, 64, 8192)):
        part = empty(kind, 4096, 4096)
        multiply_packed(torch.zeros(rows, 4096, dtype=torch.bfloat16), part)
    multiply_packed(torch.zeros(8192, 4096, dtype=torch.bfloat16), part, None, "silu", 2)
    for x in (
        torch.zeros(8000, 8192, dtype=torch.bfloat16),
        LazyProduct("silu", *torch.zeros(2, 8000, 4096).bfloat16()),
    ):
        rows_in_fp8(x, by_column=True)
    layer = ExpertWeights(empty("blocks", 1024, 2048, 8), empty("blocks", 2048, 512, 8), gated(F.silu))
    for tokens in (1, 8, 64, 300, 2048):
        x, chosen = torch.zeros(tokens, 2048, dtype=torch.bfloat16), torch.zeros(tokens, 4, dtype=torch.int32)
        pair_results(x, chosen, layer)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_all, in_registers=True)
