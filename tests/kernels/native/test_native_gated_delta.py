"""The gated delta rule of rows of one token in C++ against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.gated_delta import naive_delta
from tests.support.kernels.native_rows import NAMES, Twins, dtypes, needs_compiler, starts
from tests.support.kernels.operations import NATIVE, gated_delta, gated_delta_memory, projected_gated_delta
from tests.support.kernels.plans import Known, Rig

pytestmark = needs_compiler
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
dims = st.sampled_from([1, 6, 16, 21, 32, 40])
bounds = st.sampled_from([1.0, 2.0])
shapes = st.tuples(st.integers(1, 3), dims, st.integers(1, 3), dims)


def compare(starts, dtype, shape, room, seed, projected, most=1.0) -> None:
    """Key heads, their size, value heads of each and their size come as `shape`."""
    key_heads, key_dim, shared, value_dim = shape
    heads, rows = key_heads * shared, len(starts)
    memory = gated_delta_memory(key_heads, key_dim, heads, value_dim, 1, 2, NAMES[dtype])
    twins = Twins(memory, starts, room, seed)
    keys = key_heads * key_dim
    mixed = twins.random((rows, 2 * keys + heads * value_dim)).to(dtype)
    q, k, v = mixed.split_with_sizes([keys, keys, heads * value_dim], 1)
    q, k, v = q.view(rows, -1, key_dim), k.view(rows, -1, key_dim), v.view(rows, -1, value_dim)
    gates = twins.random((rows, 2 * heads))
    rates, bias = -twins.random((heads,)).abs(), twins.random((heads,))

    def call(batch, view):
        if projected:
            strength, step = (gates.to(dtype) * 3).split(heads, 1)
            return projected_gated_delta(q, k, v, step, strength, rates, bias, batch, view, most)
        g, beta = gates.split(heads, 1)
        return gated_delta(q, k, v, -g.abs(), beta.sigmoid().to(dtype), batch, view)

    twins.compare(call, TOLERANCES[dtype], 2e-5)


@settings(max_examples=50, deadline=None)
@given(
    starts, dtypes, shapes, st.sampled_from([0, 1, 5]), st.integers(0, 999), st.booleans(), st.sampled_from([1.0, 2.0])
)
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, shape, room, seed, projected, most):
    compare(starts, dtype, shape, room, seed, projected, most)


@pytest.mark.parametrize("starts", [[79], [5], [19, 20, 47, 59]])
@pytest.mark.parametrize("dtype", list(NAMES))
def test_states_wide_enough_for_threads_equal_the_reference(starts, dtype):
    compare(starts, dtype, (5, 128, 1, 128), 0, 1, True)
    compare(starts, dtype, (3, 96, 2, 130), 3, 2, True)


def test_token_by_token_a_sequence_equals_the_loop():
    torch.manual_seed(0)
    sequences = []
    for n in (50, 33, 8):
        q, k = (torch.randn(n, 2, 6) for _ in range(2))
        inputs = q, k, torch.randn(n, 4, 5), -torch.rand(n, 4) * 0.3, torch.rand(n, 4)
        y, states = naive_delta(*inputs)
        sequences.append(Known(inputs, (y,), {"delta": states}))

    def call(inputs, batch, view):
        return (gated_delta(*inputs, batch, view),)

    Rig(gated_delta_memory(2, 6, 4, 5, 1, 2, "float32"), sequences, call, room=3, operations=NATIVE).run([1])
