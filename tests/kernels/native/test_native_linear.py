"""The product in C++ is the product, whatever the sizes, and a row has the same bits whatever else is in the batch."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.activations import NAMES
from weft.kernels.cpu import linear as products
from weft.kernels.cpu.linear import FEW_ROWS, activated_linear, linear, prepare
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library
from weft.kernels.native.layouts import DENSE_AND_PANELS, PANELS, as_panels, panels_of
from weft.kernels.native.linear import pack, product
from weft.kernels.native.packing import PANEL
from weft.kernels.weight import Weight

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# More rows than one piece of work has, and not a multiple of any tile.
MANY = 403


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias=None):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def in_panels(weight, bias=None):
    return Weight((as_panels(Stored.of(weight), pack(weight)),), bias)


def assert_close(found, expected, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40) | st.integers(90, 410),
    inputs=st.integers(1, 70) | st.integers(250, 530),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
    threads=st.sampled_from((1, 2, 3, 8)),
)
def test_any_sizes_give_the_product(dtype, rows, inputs, outputs, biased, threads):
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs, inputs, seed=1) / inputs**0.5
    weight, bias = weight.to(dtype), random(outputs, dtype=dtype, seed=2) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_close(linear(x, in_panels(weight, bias)), exact(x, weight, bias), dtype)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inputs", [1, 3, 4, 6, 8, 77, 128, 389, 640])
def test_weights_of_16_bits_give_the_same_floats_as_when_they_are_widened(inputs):
    weight = random(130, inputs, dtype=torch.bfloat16, seed=1)
    for rows in (*range(1, 9), 16, MANY):
        x, bias = random(rows, inputs), random(130, seed=2)
        short, wide = (product(x, pack(each), 130, bias) for each in (weight, weight.float()))
        assert torch.equal(short, wide)


@pytest.mark.parametrize("inputs", [1, 4, 7, 12, 128, 260])
def test_nothing_behind_the_weights_is_read(inputs):
    """Multiply in a child process, which dies when it reads the page behind the weights."""
    packed = pack(random(64, inputs, dtype=torch.bfloat16, seed=1))
    used = packed.numel() * packed.element_size()
    size = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    at_end = torch.frombuffer(memory, dtype=packed.dtype, count=packed.numel(), offset=size - used).view_as(packed)
    at_end.copy_(packed)
    end = at_end.data_ptr() + used
    no_access = 0
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), no_access) == 0
    x = random(8, inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for rows in range(1, 9):
                    product(x[:rows], at_end, 64)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [70, 4 * PANEL])
@pytest.mark.parametrize("parts", [1, 2])
def test_activations_are_torchs_own(activation, dtype, outputs, parts):
    weight, bias = random(outputs, 40, dtype=dtype, seed=1) / 6, random(outputs, dtype=dtype, seed=2)
    for rows in (3, 20):
        x = random(rows, 40, dtype=dtype)
        sums = exact(x, weight, bias)
        gate, gated = sums.chunk(2, -1)
        expected = activation(sums) if parts == 1 else activation(gate) * gated
        assert_close(activated_linear(x, in_panels(weight, bias), activation, parts), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, F.silu])
def test_a_row_has_the_same_bits_in_every_batch(dtype, activation):
    weight, bias = random(160, 600, dtype=dtype, seed=1), random(160, dtype=dtype, seed=2)
    packed, x = pack(weight), random(MANY, 600, dtype=dtype)
    together = product(x, packed, 160, bias, activation)
    for rows in (*range(1, 30), 95, 96, 97, 150):
        for first in (0, 13):
            some = product(x[first : first + rows], packed, 160, bias, activation)
            assert torch.equal(some, together[first : first + rows])
    x[1:] = torch.nan
    assert torch.equal(product(x, packed, 160, bias, activation)[0], together[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype):
    wide, weight = random(30, 90, dtype=dtype), random(20, 31, dtype=dtype, seed=1) / 6
    for rows in (3, 30):
        x = wide[:rows, 40:71]
        assert_close(linear(x, in_panels(weight)), exact(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_have_any_number_of_dimensions(dtype):
    x, weight = random(2, 3, 5, 31, dtype=dtype), random(20, 31, dtype=dtype, seed=1) / 6
    found = linear(x.transpose(0, 1), in_panels(weight))
    assert_close(found, exact(x.transpose(0, 1), weight), dtype)
    assert linear(x[:0, 0, 0], in_panels(weight)).shape == (0, 20)


def test_operands_that_the_kernel_would_misread_are_refused():
    x, panels = random(3, 8), pack(random(40, 8, seed=1))
    for wrong in (
        lambda: product(random(8, 3).t(), panels, 40),
        lambda: product(x, panels, 40, random(3)),
        lambda: product(x.bfloat16(), panels, 40),
        lambda: product(x[:, :0], panels[:, :0], 40),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_with_16_bit_units_few_rows_read_panels_and_many_rows_blocks():
    weight = random(24, 16, dtype=torch.bfloat16) / 4
    wrong = torch.full_like(weight, torch.nan)
    both = Weight((Stored(DENSE_AND_PANELS, (weight, pack(wrong)), 24, 16),))
    most = FEW_ROWS[torch.bfloat16]
    few, many = (random(rows, 16, dtype=torch.bfloat16) for rows in (most, most + 1))
    assert linear(few, both).isnan().all()
    assert_close(linear(many, both), exact(many, weight), torch.bfloat16)


@pytest.mark.parametrize("kept_short", [True, False])
def test_float32_weights_take_half_the_bytes_if_they_are_16_bit_numbers(kept_short):
    weight = random(40, 16, dtype=torch.bfloat16).float() + (0 if kept_short else 1e-6)
    for twice in (False, True):
        prepared = prepare(Weight.of(weight), twice)
        [part] = prepared.parts
        assert panels_of(part).dtype == (torch.bfloat16 if kept_short else torch.float32)
        assert (part.format is PANELS) == (kept_short or not twice)
        for rows in (7, FEW_ROWS[torch.float32] + 1):
            x = random(rows, 16)
            assert_close(linear(x, prepared), exact(x, weight), torch.float32)


def test_without_a_compiler_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(products, "HAS_BFLOAT16", False)
    monkeypatch.setattr(products.native, "available", lambda: False)
    for dtype in DTYPES:
        weight, x = random(24, 16, dtype=dtype) / 4, random(9, 16, dtype=dtype)
        prepared = prepare(Weight.of(weight), twice=True)
        assert prepared.matrix is weight
        assert_close(linear(x, prepared), exact(x, weight), dtype)
