"""The delta rule with decays by channel of rows of one token in C++ against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.channel_delta import make_rig
from tests.support.kernels.native_rows import NAMES, Twins, dtypes, needs_compiler, starts
from tests.support.kernels.operations import CPU, NATIVE
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape

pytestmark = needs_compiler
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
dims = st.sampled_from([1, 6, 16, 21, 32, 40])
shapes = st.tuples(st.integers(1, 3), dims, dims)


def compare(starts, dtype, shape, room, seed, projected) -> None:
    """Heads, and the sizes of their keys and values, come as `shape`."""
    heads, key_dim, value_dim = shape
    rows = len(starts)
    memory = CPU.channel_delta_memory(ChannelDeltaShape(*shape, 1, 2), NAMES[dtype])
    twins = Twins(memory, starts, room, seed)
    keys = heads * key_dim
    mixed = twins.random((rows, 2 * keys + heads * value_dim)).to(dtype)
    q, k, v = mixed.split_with_sizes([keys, keys, heads * value_dim], 1)
    q, k, v = q.view(rows, -1, key_dim), k.view(rows, -1, key_dim), v.view(rows, -1, value_dim)
    step, strength = twins.random((rows, heads, key_dim)), twins.random((rows, heads))
    rates, bias = -twins.random((heads,)).abs(), twins.random((heads, key_dim))

    def call(batch, view):
        if projected:
            inputs = ChannelDeltaInputs(q, k, v, step.to(dtype), strength.to(dtype), rates, bias)
        else:
            inputs = ChannelDeltaInputs(q, k, v, -step.abs(), strength.sigmoid().to(dtype))
        return batch.operations.channel_delta(inputs, batch, view)

    twins.compare(call, TOLERANCES[dtype], 2e-5)


@settings(max_examples=30, deadline=None)
@given(starts, dtypes, shapes, st.sampled_from([0, 1, 5]), st.integers(0, 999), st.booleans())
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, shape, room, seed, projected):
    compare(starts, dtype, shape, room, seed, projected)


@pytest.mark.parametrize("dtype", list(NAMES))
def test_states_wide_enough_for_threads_equal_the_reference(dtype):
    compare([19, 20, 47, 59], dtype, (5, 128, 130), 3, 1, True)


def test_token_by_token_a_sequence_equals_the_loop():
    make_rig([50, 33, 8], room=3, operations=NATIVE).run([1])


def test_strong_decay_neither_overflows_nor_leaks():
    make_rig([40, 20], decay=300.0, operations=NATIVE).run([1])
