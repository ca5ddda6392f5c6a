"""The faster interpreter computes what Triton's own computes, launch after launch, and wraps around as it does."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.support.kernels.interpreter import Types

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


@triton.jit
def squared(x):
    return x * x


@triton.jit
def sum_of_squares(values, results, COUNT: tl.constexpr):
    x = tl.load(values + tl.arange(0, COUNT))
    # A function of our own, and one of Triton's library that sees another part of the language.
    tl.store(results + tl.program_id(0), tl.sum(squared(x.to(tl.float32)), axis=0))


@triton.jit
def double(values):
    tl.store(values, tl.load(values) + tl.load(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8])
def test_every_launch_and_program_calls_functions_inside(dtype):
    for count in (4, 8):
        values, results = torch.arange(count).to(dtype), torch.zeros(3)
        sum_of_squares[(3,)](values, results, COUNT=count)
        assert results.tolist() == [sum(n * n for n in range(count))] * 3


def test_the_language_is_whole_again_after_a_launch_that_failed():
    whole = tl.load
    with pytest.raises(Exception, match="COUNT"):
        sum_of_squares[(1,)](torch.zeros(4), torch.zeros(1))
    assert tl.load is whole
    test_every_launch_and_program_calls_functions_inside(torch.float32)


def test_sums_wrap_around_as_they_do_in_tritons_own():
    """Without debugging, Triton's own interpreter drops what it finds about overflow."""
    values = torch.tensor([2**30], dtype=torch.int32)
    double[(1,)](values)
    assert values.item() == -(2**31)
    assert not interpreter.interpreter_builder.options.debug


@triton.jit
def larger_and_sum(a, b, c, d):
    return tl.where(a > c, a, c), b + d


@triton.jit
def reduce_rows(values, largest, sums, ROWS: tl.constexpr, COUNT: tl.constexpr, keep: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    x = tl.load(values + place)
    larger, added = tl.reduce((x, x.to(tl.float32)), 1, larger_and_sum, keep_dims=keep)
    if keep:
        larger, added = larger.reshape(ROWS), added.reshape(ROWS)
    tl.store(largest + tl.arange(0, ROWS), larger)
    tl.store(sums + tl.arange(0, ROWS), added)


@pytest.mark.parametrize("keep", [False, True])
def test_a_function_of_a_kernel_reduces_an_axis(keep):
    values = torch.randint(-9, 9, (4, 8), dtype=torch.int32)
    largest, sums = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
    reduce_rows[(1,)](values, largest, sums, ROWS=4, COUNT=8, keep=keep)
    assert largest.tolist() == values.amax(1).tolist()
    assert sums.tolist() == values.sum(1).tolist()


@triton.jit
def mix(halves, numbers, results, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    half, number = tl.load(halves + place), tl.load(numbers + place)
    square = half[:, None] * number[None, :] + 0.5
    total = tl.sum(square, axis=0) + (number // 2) * (1 - number)
    tl.store(results + place, total + (half / 3) * (half == half) + number % 2)


def test_operands_of_other_types_and_shapes_are_still_converted():
    halves, numbers, results = torch.arange(8).half(), torch.arange(3, 11, dtype=torch.int32), torch.zeros(8)
    mix[(1,)](halves, numbers, results, COUNT=8)
    square = (halves[:, None] * numbers[None, :] + 0.5).float().sum(0)
    expected = square + (numbers // 2) * (1 - numbers) + halves.float() / 3 + numbers % 2
    torch.testing.assert_close(results, expected)


def test_it_is_the_one_that_runs_these_tests():
    assert isinstance(interpreter._get_np_dtype, Types)


@triton.jit
def copy_some(source, target, count, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


@pytest.mark.parametrize("large", ["source", "target"])
def test_an_access_outside_of_the_tensors_is_an_error(large):
    tensors = {name: torch.zeros(8 if name == large else 6) for name in ("source", "target")}
    copy_some[(1,)](**tensors, count=6, COUNT=8)
    with pytest.raises(Exception, match=r"1 elements lie outside .* the first is .*0 bytes behind the end"):
        copy_some[(1,)](**tensors, count=7, COUNT=8)


@triton.jit
def add_one(values, first):
    tl.atomic_add(values + first, 1)


def test_so_is_one_before_a_tensor_or_by_an_atomic_operation():
    values = torch.zeros(4, dtype=torch.int32)
    add_one[(1,)](values, 3)
    for first in (-1, 4):
        with pytest.raises(Exception, match="outside"):
            add_one[(1,)](values, first)
    assert values.tolist() == [0, 0, 0, 1]
