"""C++ kernels of stored formats against their decode, with the same rounding of rows, for any sizes and threads."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from weft.kernels.cpu import embedding, linear, moe
from weft.kernels.experts import ExpertWeights, clamped, gated
from weft.kernels.formats import block_types
from weft.kernels.formats.blocks import OtherInputs
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.rounded import INTEGERS, RoundedRows, in_integers
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.native.stored import FORMATS, NAMES, name_of, pack
from weft.kernels.plain import moe as plain
from weft.kernels.weight import Weight

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

# Group of all inputs: longer than any.
ALL_INPUTS = 1 << 20
GROUPED = [
    *(Grouped(bits, group, zeros) for bits in (4, 8) for group in (128, ALL_INPUTS) for zeros in (False, True)),
    Grouped(4, 32, True), Grouped(4, 96), Nvfp4(),
]  # fmt: skip
BLOCK_FORMATS = [format for format in NAMES if format != Mxfp4()]
MANY = 70
# Where the scales of a block lie, which must be numbers: the places of 16-bit floats.
HALVES = {"q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "mxfp4": ()}


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=drawn(seed)).to(dtype)


def stored(format, outputs: int, inputs: int, seed: int = 0, experts: int | None = None) -> Stored:
    """Return a matrix of random bytes, whose scales are random numbers."""
    if isinstance(format, (Fp8, Mxfp4, Grouped, Nvfp4)):
        shape = (outputs, inputs) if experts is None else (experts, outputs, inputs)
        return format.encode(random(*shape, seed=seed) / inputs**0.5)
    shape = (experts or 1, outputs, inputs // format.numbers)
    generator = drawn(seed)
    codes = torch.randint(0, 256, (*shape, format.bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES.get(NAMES[format], (0,)):
        halves = (torch.randn(*shape, 1, generator=generator) * 0.01).half().view(torch.uint8)
        codes[..., place : place + 2] = halves
    if NAMES[format] == "mxfp4":
        codes[..., 0] = torch.randint(0, 125, shape, generator=generator)
    flat = codes.flatten(-2)
    return format.of(flat if experts is not None else flat[0])


def in_panels(matrix: Stored, rounds: bool) -> Stored:
    found = pack(matrix, rounds)
    assert found is not None
    assert isinstance(found.format, StoredPanels)
    return found


def wanted(x: torch.Tensor, matrix: Stored, rounds: bool) -> torch.Tensor:
    rows = in_integers(x) if rounds else x
    return F.linear(rows.double(), matrix.decode().double())


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    limit = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}[found.dtype]
    assert ((found.double() - expected).abs().max() <= limit * expected.abs().max()).item()


def rounds_rows(matrix: Stored) -> bool:
    return name_of(matrix.format) is not None


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def label(format) -> str:
    more = f"-{format.group}-{format.has_zeros}" if isinstance(format, Grouped) else ""
    return format.name.replace(" ", "-") + more


@pytest.mark.parametrize(
    ("format", "rounds"),
    [*((format, rounds) for format in [*NAMES, *GROUPED] for rounds in (True, False)),
     (Fp8(128, 128), False), (Fp8(1, 512), False), (Fp8(128, 64), False)],
    ids=lambda value: value if isinstance(value, bool) else label(value),
)  # fmt: skip
def test_any_number_of_rows_and_threads_gives_the_product_and_the_same_bits(format, rounds):
    for outputs, inputs in ((70, 512), (32, 256), (1, 768)):
        format = Fp8(1, inputs) if format == Fp8(1, 512) else format
        matrix = stored(format, outputs, inputs, seed=outputs)
        panels, x = in_panels(matrix, rounds), random(MANY, inputs, seed=1)
        together = linear.multiplied(x, panels, None)
        assert_close(together, wanted(x, matrix, rounds))
        for rows in (*range(1, 20), 33, 64, MANY):
            with threads(1 + rows % 4):
                assert torch.equal(linear.multiplied(x[:rows], panels, None), together[:rows]), rows
        shorter = x[5:8].bfloat16()
        assert_close(linear.multiplied(shorter, panels, None), wanted(shorter.float(), matrix, rounds))


@pytest.mark.parametrize("inputs", [1, 31, 130, 300])
def test_fp8_may_have_any_sizes(inputs):
    matrix = stored(Fp8(128, 128), 150, inputs)
    x = random(9, inputs, seed=1)
    assert_close(linear.multiplied(x, in_panels(matrix, True), None), wanted(x, matrix, False))


def test_every_code_of_fp8_is_widened_exactly_and_those_that_are_no_number_are_left_to_decode():
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1)
    numbers = codes[(codes & 0x7F) != 0x7F].view(-1, 1)
    ones = torch.ones(len(numbers), 1)
    matrix = Stored(Fp8(1, 1), (numbers.view(torch.float8_e4m3fn), ones), len(numbers), 1)
    found = linear.multiplied(torch.ones(1, 1), in_panels(matrix, False), None)
    assert torch.equal(found[0], numbers.view(torch.float8_e4m3fn).float()[:, 0])
    none = Stored(Fp8(1, 1), (codes.view(torch.float8_e4m3fn), torch.ones(256, 1)), 256, 1)
    assert pack(none, False) is None
    assert linear.prepare(Weight((none,)), False).parts[0] is none


def test_the_least_exponents_of_mxfp4_are_exact_and_the_one_that_is_no_number_is_left_to_decode():
    codes = torch.randint(0, 256, (64, 16), dtype=torch.uint8, generator=drawn())
    exponents = torch.arange(64, dtype=torch.uint8).view(64, 1)
    matrix = Stored(Mxfp4(), (codes, exponents), 64, 32)
    x = random(3, 32) * 2.0**60
    for rounds in (True, False):
        assert_close(linear.multiplied(x, in_panels(matrix, rounds), None), wanted(x, matrix, rounds))
    assert pack(replace(matrix, tensors=(codes, torch.full_like(exponents, 255))), True) is None


def test_groups_may_have_any_sizes_and_those_that_kernels_cannot_read_are_decoded():
    """The last group is shorter than the others, or groups end inside a block."""
    x = random(5, 352, seed=1)
    for format, has_kernel in ((Grouped(4, 128, True), True), (Grouped(4, 96), True), (Grouped(4, 16), False)):
        matrix = stored(format, 40, 352)
        assert (pack(matrix, True) is not None) == has_kernel
        [part] = linear.prepare(Weight((matrix,)), False, rounds={INTEGERS}).parts
        assert_close(linear.multiplied(x, part, None), wanted(x, matrix, has_kernel))
    odd = stored(Grouped(4, 128), 40, 75)
    [part] = linear.prepare(Weight((odd,)), False, rounds={INTEGERS}).parts
    assert part is odd
    assert_close(linear.multiplied(x[:, :75], part, None), wanted(x[:, :75], odd, False))


@pytest.mark.parametrize("rounds", [True, False])
def test_numbers_that_are_not_finite_show_in_their_row_only(rounds):
    panels, x = in_panels(stored(block_types.Q4_K, 40, 512), rounds), random(6, 512)
    clean = linear.multiplied(x, panels, None)
    for wrong in (torch.nan, torch.inf):
        dirty = x.clone()
        dirty[2, 77] = wrong
        found = linear.multiplied(dirty, panels, None)
        assert not found[2].isfinite().any()
        assert torch.equal(found[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    tiny = torch.full((1, 512), 2.0**-120)
    assert not linear.multiplied(tiny, panels, None).isnan().any()


@pytest.mark.parametrize("activation", [F.silu, F.relu])
@pytest.mark.parametrize("parts", [1, 2])
def test_biases_and_activations_follow_the_sums(activation, parts):
    matrix, bias, x = stored(block_types.Q8_0, 128, 64), random(128, seed=2), random(5, 64, seed=3)
    sums = wanted(x, matrix, True) + bias
    first, second = sums.chunk(2, -1)
    weight = Weight((in_panels(matrix, True),), bias)
    found = linear.activated_linear(x, weight, activation, parts)
    assert_close(found, activation(sums) if parts == 1 else activation(first) * second)


def test_parts_of_different_formats_are_one_matmul():
    parts = [stored(block_types.Q4_K, 40, 256), stored(block_types.Q6_K, 7, 256), Stored.of(random(33, 256, seed=4))]
    bias, x = random(80, seed=5), random(6, 256, seed=6)
    weight = linear.prepare(Weight(tuple(parts), bias), False, rounds={INTEGERS})
    expected = torch.cat([wanted(x, part, rounds_rows(part)) for part in parts], -1) + bias
    for rows in (1, 6):
        assert_close(linear.linear(x[:rows], weight), expected[:rows])


def test_inputs_in_another_order_are_taken_before_they_are_rounded():
    matrix, order = stored(block_types.Q5_K, 40, 256), torch.randperm(256, generator=drawn())
    prepared = linear.prepare(Weight((OtherInputs.of(matrix, order),)), False, rounds={INTEGERS})
    wide = random(9, 300, seed=1)
    for x in (wide[:, 20:276], wide[:, :256].bfloat16()):
        assert_close(linear.linear(x, prepared), wanted(x.float()[:, order], matrix, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_may_have_any_shape_and_dtype(dtype):
    matrix = stored(block_types.IQ4_XS, 40, 256)
    x = random(2, 3, 256, dtype=dtype)
    panels = in_panels(matrix, True)
    found, expected = (
        linear.multiplied(x.transpose(0, 1), panels, None),
        wanted(x.float().transpose(0, 1), matrix, True),
    )
    assert found.dtype == dtype
    assert_close(found, expected)
    assert linear.multiplied(x[:0], panels, None).shape == (0, 3, 40)


@pytest.mark.parametrize("format", [*NAMES, Fp8(128, 128)], ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_look_ups_read_panels(format, dtype):
    table = stored(format, 70, 256)
    prepared = embedding.prepare_table(table)
    assert isinstance(prepared.format, StoredPanels)
    tokens = torch.tensor([0, 69, 31, 32, 5, 5], dtype=torch.int32)
    found = embedding.look_up(tokens, prepared, 0.5, dtype)
    torch.testing.assert_close(
        found, table.decode()[tokens].to(dtype) * 0.5, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-7
    )


def test_a_tied_table_is_its_heads():
    table = stored(block_types.Q6_K, 70, 256)
    head = linear.prepare(Weight((table,)), False, rounds={INTEGERS})
    assert embedding.prepare_table(table, head) is head.parts[0]


def test_without_a_compiler_rows_are_rounded_all_the_same(monkeypatch):
    matrix, x = stored(block_types.Q4_K, 40, 256), random(4, 256)
    monkeypatch.setattr(library, "available", lambda: False)
    for rounds in (True, False):
        [part] = linear.prepare(Weight((matrix,)), False, {INTEGERS} if rounds else set()).parts
        assert isinstance(part.format, RoundedRows) == rounds
        assert_close(linear.multiplied(x, part, None), wanted(x, matrix, rounds))
    assert embedding.prepare_table(matrix) is matrix


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (block_types.Q4_K, block_types.Q6_K),
        (Mxfp4(), Mxfp4()),
        (Fp8(128, 128), Fp8(128, 128)),
        (Mxfp4(), None),
        (Grouped(4, 128), Grouped(8, 64, True)),
        (Nvfp4(), Nvfp4()),
    ],
    ids=["k", "mxfp4", "fp8", "mixed", "integers", "nvfp4"],
)
def test_experts_in_stored_formats_are_those_that_their_decode_gives(first, second, rows, rounds):
    hidden, inner, experts, k = 256, 256, 6, 2
    one = stored(first, 2 * inner, hidden, 1, experts)
    dense = Stored.of(random(experts, hidden, inner, seed=2) / 16)
    two = dense if second is None else stored(second, hidden, inner, 2, experts)
    activation = clamped() if first == Mxfp4() else gated(F.silu)
    biases = random(experts, 2 * inner, seed=3), random(experts, hidden, seed=4)
    layer = ExpertWeights(one, two, activation, *biases)
    x, logits = random(rows, hidden, seed=5), random(rows, experts, seed=6)
    routing = plain.route_softmax(logits, k, True)

    def take(number: int, row: torch.Tensor) -> torch.Tensor:
        sums = wanted(row, one.expert(number), rounds and rounds_rows(one)) + biases[0][number]
        between = activation(sums.float())
        return wanted(between, two.expert(number), rounds and rounds_rows(two)) + biases[1][number]

    expected = torch.stack(
        [
            sum(routing[0][row, j].double() * take(int(routing[1][row, j]), x[row : row + 1])[0] for j in range(k))
            for row in range(rows)
        ]
    )
    prepared = moe.prepare_experts(layer, False, {INTEGERS} if rounds else set())
    found = moe.experts(x, routing, prepared)
    assert ((found.double() - expected).abs().max() <= 2e-3 * expected.abs().max()).item()
    for row in range(rows):
        alone = moe.experts(x[row : row + 1], tuple(each[row : row + 1] for each in routing), prepared)
        assert torch.equal(alone, found[row : row + 1])


def test_many_rows_of_experts_are_taken_piece_by_piece():
    layer = ExpertWeights(stored(Mxfp4(), 64, 32, 1, 4), stored(Mxfp4(), 32, 32, 2, 4), gated(F.silu))
    x, logits = random(moe.MOST_MIXED + 9, 32, seed=5), random(moe.MOST_MIXED + 9, 4, seed=6)
    routing, prepared = plain.route_softmax(logits, 2, True), moe.prepare_experts(layer, False, {INTEGERS})
    found = moe.experts(x, routing, prepared)
    last = moe.experts(x[-9:], tuple(each[-9:] for each in routing), prepared)
    assert torch.equal(found[-9:], last)


def test_names_of_kinds_are_known_to_the_kernels():
    assert {name_of(format) for format in NAMES} == set(FORMATS)
    assert name_of(Fp8(1, 32)) is None


@pytest.mark.parametrize(
    "format", [block_types.Q4_K, block_types.Q8_0, Mxfp4(), Grouped(4, 32), Fp8(128, 128)], ids=label
)
def test_a_part_of_a_matrix_is_packed_like_its_copy(format):
    """Rows of a view lie apart, and scales of groups and blocks may be a view too."""
    matrix = stored(format, 70, 1024, experts=3)
    part = format.cut_columns(replace(matrix, tensors=tuple(each[1:] for each in matrix.tensors)), 256, 768)
    assert part is not None
    assert not part.tensors[0].is_contiguous()
    copy = replace(part, tensors=tuple(each.clone(memory_format=torch.contiguous_format) for each in part.tensors))
    assert torch.equal(in_panels(part, True).tensors[0], in_panels(copy, True).tensors[0])
    for number in range(part.experts):
        [alone] = in_panels(part.expert(number), True).tensors
        assert torch.equal(alone, in_panels(part, True).tensors[0][number])
