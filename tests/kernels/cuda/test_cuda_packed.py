"""Matmuls with packed weights: every format, any number of rows, ragged sizes; and the bits of their codes."""

from __future__ import annotations

import itertools
import operator
import re

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda.formats.codes import FP8_MOVES, MXFP4_MOVES
from weft.kernels.cuda.formats.packed import FP8 as FP8_NAME
from weft.kernels.cuda.formats.packed import FP8_PLACES, MXFP4, MXFP4_PLACES, CodeTiles, pack, words_of
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
from weft.kernels.formats.block_types import Q4_K, Q8_0
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import Stored
from weft.kernels.plain import moe as plain
from weft.kernels.weight import Weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = {"blocks": Fp8(128, 128), "outputs": Fp8(1, 1 << 20), "one": Fp8(1 << 20, 1 << 20), "mxfp4": Mxfp4()}


def matrix(kind: str, outputs: int, inputs: int, device: str = "cpu") -> Stored:
    torch.manual_seed(outputs + inputs)
    plain = torch.randn(outputs, inputs) * torch.rand(outputs, 1).exp() * inputs**-0.5
    stored = FORMATS[kind].encode(plain)
    return Stored(stored.format, tuple(each.to(device) for each in stored.tensors), outputs, inputs)


# Codes ---------------------------------------------------------------------------------------------------------------


LOGIC = {"and": operator.and_, "or": operator.or_, "shl": operator.lshift, "shr": operator.rshift}


def run_assembly(text: str, word: int) -> int:
    """Return what PTX of 32-bit logic computes from a word."""
    values = {"$1": word}
    for name, target, *operands in re.findall(r"(\w+)\.b32 ([$\w]+), ([$\w]+), ([$\w]+);", text):
        one, other = (values[each] if each in values else int(each, 0) for each in operands)
        values[target] = LOGIC[name](one, other) & 0xFFFFFFFF
    return values["$0"]


def decoded_by_assembly(words: torch.Tensor, moves: tuple[str, ...]) -> torch.Tensor:
    """Return the numbers of all codes of a line, in the order of its inputs."""
    pairs = [run_assembly(text, int(word) & 0xFFFFFFFF) for text in moves for word in words]
    halves = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]
    return torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()


def test_codes_of_fp8_become_bfloat16_by_a_few_instructions():
    for _ in range(20):
        codes = torch.randint(0, 256, (128,))
        codes = codes.where(codes & 127 != 127, 0)
        words = words_of(codes.int()[None], FP8_PLACES)[0]
        wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        assert torch.equal(decoded_by_assembly(words, FP8_MOVES) * 2.0**120, wanted)


def test_codes_of_mxfp4_become_bfloat16_by_a_few_instructions():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    values = torch.cat([values, -values])
    for _ in range(20):
        codes = torch.randint(0, 16, (128,))
        words = words_of(codes.int()[None], MXFP4_PLACES)[0]
        assert torch.equal(decoded_by_assembly(words, MXFP4_MOVES) * 2.0**126, values[codes])


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
    for stored in (small, huge, Stored.of(torch.randn(3, 4))):
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
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 72, 1088), (5, 130, 384), (33, 40, 160)])
@pytest.mark.parametrize("fold", [False, True])
def test_matmuls_are_those_with_the_decoded_matrix(device, kind, rows, outputs, inputs, fold):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32 if fold else torch.float16
    check(kind, rows, outputs, inputs, device, dtype, fold=fold)


@pytest.mark.parametrize("kind", ["blocks", "mxfp4"])
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


@pytest.mark.parametrize("kind", FORMATS)
def test_a_matrix_is_decoded_piece_by_piece(kind, monkeypatch):
    monkeypatch.setattr("weft.kernels.cuda.linear.decoded.PIECE", 64 * 320)
    stored, x = matrix(kind, 150, 320), torch.randn(7, 320)
    assert torch.equal(decode(pack(stored), 16, 90, x), stored.decode()[16:90])
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
    plain = torch.randn(count, outputs, inputs) * inputs**-0.5
    form = Fp8(outputs, inputs) if kind == "one" else Fp8(1, inputs) if kind == "outputs" else FORMATS[kind]
    return form.encode(plain)


@pytest.mark.parametrize(("kind", "exact"), [("blocks", False), ("outputs", True), ("mxfp4", False), ("mxfp4", True)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_are_those_with_decoded_matrices(kind, exact, tokens):
    clamp = kind == "mxfp4"
    first, second = of_experts(kind, 96, 160), of_experts(kind, 160, 64 if clamp else 48)
    if clamp:
        first = of_experts(kind, 128, 160)
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


@pytest.mark.gpu
@pytest.mark.parametrize("form", [Q4_K, Q8_0, Grouped(4, 128), Nvfp4(), Fp8(32, 32)], ids=lambda form: form.name)
def test_formats_without_packed_kernels_are_exact_too(form):
    stored = form.encode(torch.randn(2880, 2816) * 0.02).to("cuda")
    weight = prepare(Weight((stored,)), False)
    x = torch.randn(700, 2816, device="cuda", dtype=torch.bfloat16)
    whole = multiply_stored(x, weight, exact=True)
    torch.testing.assert_close(whole.float(), F.linear(x.float(), stored.decode()), rtol=2e-2, atol=2e-2)
    for rows in (1, 8, 16, 17, 65, 500):
        assert torch.equal(multiply_stored(x[:rows], weight, exact=True), whole[:rows])


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_kernels_of_their_own_are_exact_too(device):
    first, second = (Q4_K.encode(torch.randn(4, outputs, 256) * 0.1) for outputs in (512, 256))
    layer = ExpertWeights(first.to(device), second.to(device), gated(F.silu))
    x = torch.randn(40, 256, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    weights = torch.rand(40, 2, device=device)
    chosen = torch.rand(40, 4, device=device).topk(2, -1).indices.int()
    found = stored_experts(x, (weights, chosen), layer, None, exact=True)
    wanted = plain.experts(x.float(), (weights, chosen), layer)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    for rows in (1, 17):
        some = stored_experts(x[:rows], (weights[:rows], chosen[:rows]), layer, None, exact=True)
        assert device == "cpu" or torch.equal(some, found[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "outputs", "mxfp4"])
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


def empty(kind: str, outputs: int, inputs: int, experts: tuple[int, ...] = ()) -> Stored:
    """Return packed zeros. What is compiled depends on nothing but formats and sizes."""
    steps, lines = -(-inputs // 128), -(-outputs // 16)
    if kind == "mxfp4":
        tensors = (torch.zeros(*experts, lines, steps, 16, 16).int(), torch.zeros(*experts, lines, steps, 16).int())
        return Stored(CodeTiles(MXFP4), tensors, outputs, inputs)
    codes = torch.zeros(*experts, lines, steps, 16, 32).int()
    if kind == "outputs":
        return Stored(CodeTiles(FP8_NAME), (codes, torch.zeros(*experts, lines * 16)), outputs, inputs)
    return Stored(CodeTiles(FP8_NAME, 128), (codes, torch.zeros(*experts, -(-outputs // 128), steps)), outputs, inputs)


def launch_matmuls() -> None:
    for kind in ("blocks", "outputs", "mxfp4"):
        part = empty(kind, 512, 448 if kind == "mxfp4" else 512)
        for rows in (1, 12, 24, 50, 128):
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part)
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part, None, "silu", 2)
        decode(part, 0, 64, torch.zeros(1, dtype=torch.bfloat16))
        for rows in (1, 128):
            multiply_packed(torch.zeros(rows, part.inputs, dtype=torch.bfloat16), part, fold=True)


def launch_experts() -> None:
    for kind, hidden in (("blocks", 256), ("mxfp4", 320)):
        layer = ExpertWeights(empty(kind, 512, hidden, (8,)), empty(kind, hidden, 256, (8,)), gated(F.silu))
        for tokens, exact in itertools.product((1, 8, 64, 128, 300), (False, True)):
            x, chosen = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 4, dtype=torch.int32)
            pair_results(x, chosen, layer, exact)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_matmuls, launch_experts, in_registers=True)
