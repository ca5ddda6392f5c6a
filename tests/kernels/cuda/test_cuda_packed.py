"""Matmuls with packed weights: every format, any number of rows, ragged sizes; and the bits of their codes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.assembly import run_assembly
from tests.support.kernels.blocks import random_blocks
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda.formats.codes import MINUS_128, MOVES
from weft.kernels.cuda.formats.packed import PLACES, SMALL_BIAS, SMALL_OFFSET, CodeTiles, pack, words_of
from weft.kernels.cuda.linear import packed, prepare
from weft.kernels.cuda.linear.decoded import decode, multiply_decoded
from weft.kernels.cuda.linear.few import counters
from weft.kernels.cuda.linear.packed import Division, multiply_packed
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe import prepare_experts
from weft.kernels.cuda.moe.packed import PairTiles, can_pack, pair_results
from weft.kernels.cuda.moe.stored import stored_experts
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.experts import ExpertWeights, SharedExpert, clamped, gated
from weft.kernels.formats.block_types import BLOCK_TYPES, Q4_K, Q8_0
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import Stored
from weft.kernels.plain import moe as plain
from weft.kernels.weight import Weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = {
    "blocks": Fp8(128, 128), "outputs": Fp8(1, 1 << 20), "one": Fp8(1 << 20, 1 << 20), "mxfp8": Fp8(1, 32),
    "mxfp4": Mxfp4(), "nvfp4": Nvfp4(), "int4": Grouped(4, 128), "int4-all": Grouped(4, 1 << 20),
    "int4-64-zeros": Grouped(4, 64, True), "int4-32": Grouped(4, 32), "int8": Grouped(8, 128),
    "int8-all": Grouped(8, 1 << 20), "int8-64": Grouped(8, 64),
}  # fmt: skip
# One of each layout. The others differ from them in places or in the number of scales.
LAYOUTS = ("blocks", "mxfp8", "mxfp4", "nvfp4", "int4-64-zeros", "int8")


def others_marked(kinds=FORMATS):
    """Return kinds: those that no layout needs are tested with the kernels only."""
    return [kind if kind in LAYOUTS else pytest.param(kind, marks=pytest.mark.kernels) for kind in kinds]


def encoded(kind: str, plain: torch.Tensor) -> Stored:
    """Return numbers in a format."""
    outputs, inputs = plain.shape[-2:]
    form = FORMATS[kind]
    if kind == "one":
        form = Fp8(outputs, inputs)
    if kind == "outputs":
        form = Fp8(1, inputs)
    if kind != "mxfp8":
        return form.encode(plain)
    # FP8 whose scales are the next powers of two.
    blocks = F.pad(plain, (0, -inputs % 32)).unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1) / 448).clamp(min=2.0**-60).log2().ceil().exp2()
    codes = (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)[..., :inputs]
    return Stored(form, (codes, scales), outputs, inputs)


def matrix(kind: str, outputs: int, inputs: int, device: str = "cpu") -> Stored:
    torch.manual_seed(outputs + inputs)
    plain = torch.randn(outputs, inputs) * torch.rand(outputs, 1).exp() * inputs**-0.5
    stored = encoded(kind, plain)
    return Stored(stored.format, tuple(each.to(device) for each in stored.tensors), outputs, inputs)


# Codes ---------------------------------------------------------------------------------------------------------------


FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
# What codes mean, and of which powers of two they are bfloat16.
MEANINGS = {
    "e4m3": (torch.arange(256).where(torch.arange(256) & 127 != 127, 0).byte().view(torch.float8_e4m3fn).double(), 120),
    "e2m1": (torch.cat([FOUR_BITS, -FOUR_BITS]), 126),
}


def decoded_by_assembly(kind: str, codes: torch.Tensor, other: int | None = None) -> torch.Tensor:
    """Return the numbers of all codes of a line, in the order of its inputs."""
    words = words_of(codes.int()[None], PLACES[kind])[0]
    given = () if other is None else (other,)
    pairs = [run_assembly(text, int(word), *given) for text in MOVES[kind] for word in words]
    halves = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]
    return torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()


def as_bits(number: float) -> int:
    """Return a bfloat16 twice."""
    return (int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF) * 0x10001


@pytest.mark.parametrize(
    ("kind", "meaning", "scales"),
    [
        ("fp8", "e4m3", [None]),
        ("mxfp8", "e4m3", [2.0**place for place in (0, 13, 50, 127)]),
        ("mxfp4", "e2m1", [2.0**place for place in (0, 13, 50, 127)]),
        ("nvfp4", "e2m1", [scale * 2.0**62 for scale in (2.0**-9, 0.8125, 1.875, 448)]),
    ],
)
def test_floats_become_bfloat16_by_a_few_instructions(kind, meaning, scales):
    values, power = MEANINGS[meaning]
    for scale in scales * (8 if scales == [None] else 2):
        codes = torch.randint(0, len(values), (128,))
        codes = codes.where((codes & 127 != 127) | (len(values) == 16), 0)
        found = decoded_by_assembly(kind, codes, None if scale is None else as_bits(scale))
        assert torch.equal(found * 2.0**power / (scale or 1.0), values[codes])


@pytest.mark.parametrize(("kind", "zeros"), [("int4", range(16)), ("int4", [200, 255]), ("int8", [128])])
def test_integers_become_bfloat16_by_a_few_instructions(kind, zeros):
    for zero in zeros:
        if zero > 15 and kind == "int4":
            continue
        codes = torch.cat([torch.arange(256), torch.randint(0, 256, (128,))]) & (15 if kind == "int4" else 255)
        for line in codes.view(3, 128):
            found = decoded_by_assembly(kind, line, MINUS_128 + zero * 0x10001)
            assert torch.equal(found, (line - zero).double())


def test_scales_of_nvfp4_are_the_same_numbers_as_small_floats():
    scales = torch.arange(1, 127).byte()
    stored = Stored(Nvfp4(), (torch.full((126, 8), 0x22).byte(), scales[:, None], torch.ones(126, 1)), 126, 16)
    found = pack(stored)
    own = found.tensors[1][:, 0, 0].flatten()[:126] & 255
    as_bfloat16 = ((own << 4) + SMALL_OFFSET).to(torch.int16).view(torch.bfloat16).double()
    assert torch.equal(as_bfloat16 * 2.0**-62, scales.view(torch.float8_e4m3fn).double())
    assert torch.equal(found.decode(), stored.decode())
    assert int(own.max()) >> 3 <= 8 + SMALL_BIAS


def test_a_scale_of_nvfp4_may_be_zero():
    stored = matrix("nvfp4", 20, 64)
    stored.tensors[1][3:9, ::2] = 0
    assert torch.equal(pack(stored).decode(), stored.decode())
    x = torch.randn(3, 64)
    torch.testing.assert_close(multiply_packed(x, pack(stored)), F.linear(x, stored.decode()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 128), (40, 160), (129, 320), (300, 64)])
def test_packing_keeps_every_number(kind, outputs, inputs):
    stored = matrix(kind, outputs, inputs)
    found = pack(stored)
    assert isinstance(found.format, CodeTiles)
    assert torch.equal(found.decode(), stored.decode())
    cut = found.format.cut_rows(found, 0, outputs // 2)
    assert torch.equal(cut.decode(), stored.decode()[: outputs // 2])


def test_what_kernels_cannot_read_stays_as_it_is():
    small = Fp8(16, 32).encode(torch.randn(32, 64))
    huge = Mxfp4().encode(torch.randn(32, 64) * 2.0**70)
    odd = Grouped(4, 96).encode(torch.randn(32, 320))
    of_few = Grouped(8, 32).encode(torch.randn(32, 320))
    with_zeros = Grouped(8, 128, True).encode(torch.randn(32, 320))
    negative = Fp8(1, 32).encode(torch.randn(32, 64))
    unlike = replace(negative, tensors=(negative.tensors[0], -torch.ones(32, 2)))
    signed = Nvfp4().encode(torch.randn(32, 64))
    signed.tensors[1][3, 1] = 200
    for stored in (small, huge, odd, of_few, with_zeros, negative, unlike, signed, Stored.of(torch.randn(3, 4))):
        assert pack(stored) is stored


# Matmuls -------------------------------------------------------------------------------------------------------------


def check(kind: str, rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype, **more) -> None:
    stored = matrix(kind, outputs, inputs, device)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=device).to(dtype) if rows % 2 else None
    wanted = F.linear(x.float(), stored.decode(), None if bias is None else bias.float())
    found = multiply_packed(x, pack(stored), bias, **more)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


CUTS = [
    Division(8, 64, 2, 4, 3, False),
    Division(16, 32, 1, 2, 3, False),
    Division(64, 64, 3, 4, 3, True),
    Division(128, 128, 1, 8, 3, True),
    Division(128, 128, 2, 8, 3, False),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", others_marked())
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 72, 1088), (5, 130, 384), (33, 40, 160)])
@pytest.mark.parametrize("fold", [False, True])
def test_matmuls_are_those_with_the_decoded_matrix(device, kind, rows, outputs, inputs, fold):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32 if fold else torch.float16
    check(kind, rows, outputs, inputs, device, dtype, fold=fold)


@pytest.mark.parametrize("kind", others_marked(["blocks", "mxfp4", "int4-32"]))
@pytest.mark.parametrize("by", CUTS)
def test_however_a_matmul_is_cut_it_is_the_same(kind, by):
    check(kind, 18, 100, 832, "cpu", torch.float16, by=by)


@pytest.mark.parametrize("kind", ["outputs", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shares", [1, 2])
def test_an_activation_after_a_matmul_is_that_of_the_matmul(kind, parts, shares):
    stored = matrix(kind, 192, 320)
    x = torch.randn(3, 320).half()
    found = multiply_packed(x, pack(stored), None, "silu", parts, by=Division(8, 64, shares, 4, 3, False))
    matmul = F.linear(x.float(), stored.decode())
    gate, up = matmul.chunk(2, -1) if parts == 2 else (matmul, 1.0)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2e-2, atol=2e-2)


@pytest.mark.kernels
@pytest.mark.parametrize("parts", [1, 2])
def test_a_launch_has_a_counter_for_every_tile_however_many_rows_there_are(parts, monkeypatch):
    stored, x, by = pack(matrix("mxfp4", 128, 512)), torch.randn(37, 512), Division(8, 64, 2, 4, 3, True)
    expected = multiply_packed(x, stored, None, "silu", parts, fold=True, by=by)
    launched, kernel = [], packed.packed_kernel

    class Noted:
        def __getitem__(self, grid):
            launched.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(packed, "packed_kernel", Noted())
    monkeypatch.setattr(packed, "COUNTERS", 4, raising=False)
    assert torch.equal(multiply_packed(x, stored, None, "silu", parts, fold=True, by=by), expected)
    assert max(launched) <= 4


def test_parts_of_a_matmul_add_up_to_it():
    stored, x = pack(matrix("blocks", 100, 2000)), torch.randn(3, 2000).half()
    by = Division(8, 64, 4, 4, 3, False)
    found = multiply_packed(x, stored, torch.ones(100).half(), summed=False, by=by)
    assert len(found) == 4
    wanted = F.linear(x.float(), stored.decode()) + 1
    torch.testing.assert_close(found.sum(0), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", others_marked())
def test_a_matrix_is_decoded_piece_by_piece(kind, monkeypatch):
    monkeypatch.setattr("weft.kernels.cuda.linear.decoded.PIECE", 64 * 320)
    stored, x = matrix(kind, 150, 320), torch.randn(7, 320)
    found = decode(pack(stored), 16, 90, x)
    # Kernels multiply the three factors of NVFP4 in another order.
    torch.testing.assert_close(found, stored.decode()[16:90], rtol=3e-7 if kind == "nvfp4" else 0, atol=0)
    found = multiply_decoded(x, pack(stored), torch.ones(150), torch.empty(7, 160)[:, :150])
    torch.testing.assert_close(found, F.linear(x, stored.decode()) + 1)


@pytest.mark.kernels
def test_parts_of_several_formats_fill_one_output():
    parts = (matrix("blocks", 136, 320), Stored.of(torch.randn(24, 320) * 0.05), matrix("mxfp4", 40, 320))
    weight = Weight(parts)
    x = torch.randn(2, 3, 320)
    wanted = F.linear(x, torch.cat([part.decode() for part in parts]))
    for exact in (False, True):
        torch.testing.assert_close(multiply_stored(x, prepare(weight, False), exact), wanted, rtol=1e-4, atol=1e-4)


# Experts -------------------------------------------------------------------------------------------------------------


def of_experts(kind: str, outputs: int, inputs: int, count: int = 6) -> Stored:
    torch.manual_seed(outputs)
    return encoded(kind, torch.randn(count, outputs, inputs) * inputs**-0.5)


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("blocks", False), ("outputs", True), ("mxfp4", False), ("mxfp4", True), ("int4-64-zeros", True),
        *(pytest.param(kind, exact, marks=pytest.mark.kernels)
          for kind, exact in itertools.product(("mxfp8", "nvfp4", "int4", "int4-32", "int8"), (False, True))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_are_those_with_decoded_matrices(kind, exact, tokens):
    clamp, inner = kind == "mxfp4", 48 if kind in ("blocks", "outputs") else 64
    first, second = of_experts(kind, 2 * inner, 160), of_experts(kind, 160, inner)
    biases = (torch.randn(6, first.outputs) * 0.1, torch.randn(6, 160) * 0.1) if clamp else (None, None)
    layer = ExpertWeights(first, second, clamped() if clamp else gated(F.silu), *biases)
    x = torch.randn(tokens, 160)
    weights, chosen = torch.rand(tokens, 2), torch.stack([torch.randperm(6)[:2] for _ in range(tokens)]).int()
    shared = SharedExpert(torch.randn(tokens, 32), torch.randn(tokens, 32), Weight.of(torch.randn(160, 32)), None)
    ready = prepare_experts(layer, False)
    assert can_pack(ready)
    found = stored_experts(x, (weights, chosen), ready, shared, exact)
    torch.testing.assert_close(found, plain.experts(x, (weights, chosen), layer, shared), rtol=1e-3, atol=1e-3)
    if not exact and tokens == 40:
        for by in ((PairTiles(16, 64, 2, 3, False),) * 2, (PairTiles(64, 32, 4, 3, True),) * 2):
            results = pair_results(x, chosen, ready, by=by)
            again = weighted_sum(results, weights, shared)
            torch.testing.assert_close(again, found, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(4480, 1600), (2890, 2880), (640, 4096)])
@pytest.mark.parametrize("fold", [False, True])
def test_layers_of_many_sizes_are_those_with_the_decoded_matrix(kind, outputs, inputs, fold):
    for rows in (1, 7, 8, 9, 16, 24, 32, 50, 64, 65, 128, 200, 512):
        check(kind, rows, outputs, inputs, "cuda", torch.bfloat16, fold=fold)
    assert not counters(torch.device("cuda", 0)).any(), "a call leaves no count behind"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_exact_matmuls_give_a_row_the_same_bits_in_any_batch(kind):
    weight = prepare(Weight((matrix(kind, 2890, 2880, "cuda"),)), False)
    x = torch.randn(1500, 2880, device="cuda", dtype=torch.bfloat16)
    whole = multiply_stored(x, weight, exact=True)
    for rows in (1, 8, 33, 65, 500):
        assert torch.equal(multiply_stored(x[:rows], weight, exact=True), whole[:rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", [*(name if name == "Q4_K" else pytest.param(name, marks=pytest.mark.kernels) for name in BLOCK_TYPES)]
)
def test_blocks_of_gguf_are_the_numbers_of_their_decode(device, kind, monkeypatch):
    monkeypatch.setattr("weft.kernels.cuda.linear.decoded.PIECE", 64 * 512)
    stored = random_blocks(BLOCK_TYPES[kind], 70, inputs=512, generator=torch.Generator().manual_seed(3)).to(device)
    weight, wanted = Weight((stored,)), stored.decode()
    unit = torch.eye(512, device=device)
    # Each product has one number: the sums are exact.
    assert torch.equal(multiply_stored(unit[:40], weight, exact=True), wanted.t()[:40])
    monkeypatch.setattr("weft.kernels.cuda.linear.stored.by_library", lambda rows, outputs: True)
    assert torch.equal(decode(stored, 5, 70, unit), wanted[5:])
    torch.testing.assert_close(multiply_stored(unit[100:], weight), wanted.t()[100:])


@pytest.mark.gpu
@pytest.mark.parametrize("form", [Q4_K, Q8_0, Grouped(4, 96), Fp8(32, 32)], ids=lambda form: form.name)
def test_formats_without_packed_kernels_are_exact_too(form):
    stored = form.encode(torch.randn(2880, 2816) * 0.02).to("cuda")
    weight = prepare(Weight((stored,)), False)
    x = torch.randn(700, 2816, device="cuda", dtype=torch.bfloat16)
    whole = multiply_stored(x, weight, exact=True)
    torch.testing.assert_close(whole.float(), F.linear(x.float(), stored.decode()), rtol=2e-2, atol=2e-2)
    for rows in (1, 8, 16, 17, 65, 500):
        assert torch.equal(multiply_stored(x[:rows], weight, exact=True), whole[:rows])


@pytest.mark.kernels
@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_kernels_of_their_own_are_exact_too(device):
    first, second = (Q4_K.encode(torch.randn(4, outputs, 256) * 0.1) for outputs in (512, 256))
    layer = ExpertWeights(first.to(device), second.to(device), gated(F.silu))
    x = torch.randn(40, 256, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    weights = torch.rand(40, 2, device=device)
    chosen = torch.rand(40, 4, device=device).topk(2, -1).indices.int()
    found = stored_experts(x, (weights, chosen), layer, None, exact=True)
    wanted = plain.experts(x.float(), (weights, chosen), layer)
    # In 16 bits the middle and the codes are rounded too.
    tolerance = 2e-2 if device == "cpu" else 1e-1
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=tolerance)
    for rows in (1, 17):
        some = stored_experts(x[:rows], (weights[:rows], chosen[:rows]), layer, None, exact=True)
        assert device == "cpu" or torch.equal(some, found[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "outputs", "mxfp8", "mxfp4", "nvfp4", "int4", "int4-32", "int8"])
@pytest.mark.parametrize("exact", [False, True])
def test_experts_of_many_tokens_are_those_with_decoded_matrices(kind, exact):
    first, second = of_experts(kind, 512, 320, 16), of_experts(kind, 320, 256, 16)
    layer = ExpertWeights(first.to("cuda"), second.to("cuda"), gated(F.silu))
    ready, x = prepare_experts(layer, False), torch.randn(600, 320, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(600, 4, device="cuda")
    chosen = torch.rand(600, 16, device="cuda").topk(4, -1).indices.int()
    whole = plain.experts(x.float(), (weights, chosen), layer)
    found = {}
    for tokens in (1, 2, 8, 40, 100, 300, 600):
        routing = weights[:tokens].contiguous(), chosen[:tokens].contiguous()
        found[tokens] = stored_experts(x[:tokens], routing, ready, None, exact)
        torch.testing.assert_close(found[tokens].float(), whole[:tokens], rtol=3e-2, atol=3e-2)
        assert not exact or torch.equal(found[tokens][:1], found[1])


# Compiled ------------------------------------------------------------------------------------------------------------


def empty(kind: str, outputs: int, inputs: int, *experts: int) -> Stored:
    """Return a packed matrix. What is compiled depends on nothing but formats and sizes."""
    return pack(encoded(kind, torch.ones(*experts, outputs, inputs)))


def launch_matmuls() -> None:
    for kind in ("blocks", "outputs", "mxfp8", "mxfp4", "nvfp4", "int4", "int4-64-zeros", "int4-32", "int8", "int8-64"):
        part = empty(kind, 512, 448 if kind == "mxfp4" else 512)
        for rows in (1, 12, 24, 50, 128) if kind in ("blocks", "mxfp4") else (1, 24, 128):
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part)
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part, None, "silu", 2)
        decode(part, 0, 64, torch.zeros(1, dtype=torch.bfloat16))
        for rows in (1, 128):
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part, fold=True)
    # A part of a weight may stay as it was.
    plain = Weight.of(torch.zeros(64, 512, dtype=torch.bfloat16)).parts[0]
    for rows in (1, 24, 128):
        multiply_packed(torch.zeros(rows, 512, dtype=torch.bfloat16), plain)


def launch_experts() -> None:
    for kind, hidden in (("blocks", 256), ("mxfp4", 320), ("int4", 256), ("nvfp4", 256)):
        layer = ExpertWeights(empty(kind, 512, hidden, 8), empty(kind, hidden, 256, 8), gated(F.silu))
        for tokens, exact in itertools.product((1, 8, 64, 128, 300), (False, True)):
            x, chosen = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 4, dtype=torch.int32)
            pair_results(x, chosen, layer, exact)


def launch_blocks() -> None:
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    for form in BLOCK_TYPES.values():
        stored = random_blocks(form, 64, inputs=512)
        multiply_stored(x, Weight((stored,)))
        decode(stored, 0, 64, x)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_matmuls, launch_experts, in_registers=True)
    assert_compiles(launch_blocks)
