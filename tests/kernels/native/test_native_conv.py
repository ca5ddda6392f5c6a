"""Causal convolution of rows of one token in C++ against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.native_rows import NAMES, Twins, dtypes, needs_compiler, starts
from tests.support.kernels.operations import causal_conv, gated_short_conv
from weft.kernels.recurrent import short_conv_memory

pytestmark = needs_compiler
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
seeds, rooms, widths, sizes = st.integers(0, 999), st.sampled_from([0, 1, 5]), st.integers(2, 5), st.integers(1, 40)


@settings(max_examples=80, deadline=None)
@given(starts, dtypes, widths, sizes, rooms, seeds, st.booleans(), st.booleans())
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, width, channels, room, seed, has_bias, activation):
    twins = Twins(short_conv_memory(channels, width, NAMES[dtype]), starts, room, seed)
    weight, bias = twins.random((width, channels)).t(), twins.random((channels,)) if has_bias else None
    # As a slice of a wider projection.
    x = twins.random((len(starts), 3 * channels)).to(dtype)[:, channels : 2 * channels]
    twins.compare(
        lambda batch, view: causal_conv(x, weight, bias, activation, batch, view), TOLERANCES[dtype], kept_tolerance=0.0
    )


@settings(max_examples=60, deadline=None)
@given(starts, dtypes, widths, sizes, rooms, seeds, st.booleans())
def test_gated_rows_and_what_they_leave_equal_the_reference(starts, dtype, width, channels, room, seed, has_bias):
    twins = Twins(short_conv_memory(channels, width, NAMES[dtype]), starts, room, seed)
    weight, bias = twins.random((width, channels)).t(), twins.random((channels,)) if has_bias else None
    projected = twins.random((len(starts), 3 * channels)).to(dtype)
    twins.compare(
        lambda batch, view: gated_short_conv(projected, weight, bias, batch, view),
        TOLERANCES[dtype],
        kept_tolerance=0.0,
    )


def test_gates_round_where_the_reference_does():
    twins = Twins(short_conv_memory(500, 3, "bfloat16"), [25, 28, 33], 0, 1)
    weight, projected = twins.random((3, 500)).t(), twins.random((3, 1500)).bfloat16()
    answer, found = (
        gated_short_conv(projected, weight, None, twins.batch(native), twins.view(native)) for native in (False, True)
    )
    # The order of a float32 sum may turn a rounding, but seldom.
    assert (found != answer).float().mean() < 0.01


@pytest.mark.parametrize("cell", [1, 2, 3])
def test_windows_may_reach_behind_the_cell(cell):
    twins = Twins(short_conv_memory(7, 4, "float32"), [0, 1, 2, 3, 4, 5, 8], 0, 1, cell)
    weight, x = twins.random((4, 7)).t(), twins.random((7, 7))
    twins.compare(lambda batch, view: causal_conv(x, weight, None, True, batch, view), 1e-5)


def test_taps_may_lie_channel_by_channel_in_the_models_dtype():
    twins = Twins(short_conv_memory(24, 3, "bfloat16"), [40, 7], 0, 1)
    weight, bias = twins.random((24, 3)).bfloat16(), twins.random((24,)).bfloat16()
    x = twins.random((2, 24)).bfloat16()
    twins.compare(lambda batch, view: causal_conv(x, weight, bias, True, batch, view), 1e-2)


def test_many_rows_are_shared_by_threads():
    twins = Twins(short_conv_memory(900, 4, "float32"), list(range(35, 75)), 2, 1)
    weight, x = twins.random((4, 900)).t(), twins.random((40, 900))
    twins.compare(lambda batch, view: causal_conv(x, weight, None, True, batch, view), 1e-5)
