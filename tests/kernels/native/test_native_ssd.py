"""The state space recurrence of rows of one token in C++ against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.native_rows import NAMES, Twins, dtypes, needs_compiler, starts
from tests.support.kernels.operations import NATIVE, ssd, ssd_memory
from tests.support.kernels.plans import Known, Rig
from tests.support.kernels.ssd import by_group, naive_ssd
from weft.kernels.recurrent import UNLIMITED

pytestmark = needs_compiler
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 6, 16, 24, 37]), st.integers(1, 3))


def compare(starts, dtype, shape, room, seed, raw, limit, skip, gated=False) -> None:
    """Heads of a group, their size, the state's and the groups come as `shape`."""
    shared, head_dim, size, groups = shape
    heads, rows = shared * groups, len(starts)
    twins = Twins(ssd_memory(heads, head_dim, size, groups, 1, 2, NAMES[dtype]), starts, room, seed)
    mixed = twins.random((rows, heads * head_dim + 2 * groups * size)).to(dtype)
    x, B, C = mixed.split_with_sizes([heads * head_dim, groups * size, groups * size], 1)
    x, B, C = x.view(rows, heads, head_dim), B.view(rows, groups, size), C.view(rows, groups, size)
    A, D, bias = -twins.random((heads,)).abs(), twins.random((heads,)), twins.random((heads,))
    dt = twins.random((rows, 2 * heads))[:, heads:]
    dt = dt.to(dtype) * 4 if raw else dt.abs()
    gate = twins.random((rows, heads * head_dim + 3)).to(dtype)[:, 3:]
    more = (bias if raw else None, limit, gate if gated else None)
    twins.compare(
        lambda batch, view: ssd(x, dt, A, B, C, D if skip else None, batch, view, *more), TOLERANCES[dtype], 2e-5
    )


@settings(max_examples=50, deadline=None)
@given(starts, dtypes, shapes, st.sampled_from([0, 1, 5]), st.integers(0, 999), *[st.booleans()] * 3)
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, shape, room, seed, raw, skip, gated):
    compare(starts, dtype, shape, room, seed, raw, UNLIMITED, skip, gated)


def test_time_steps_stay_within_their_limits():
    compare([3, 19, 27], torch.float32, (2, 8, 16, 1), 0, 1, True, (0.2, 1.5), True)


@pytest.mark.parametrize("starts", [[79], [5], [19, 20, 47, 59]])
@pytest.mark.parametrize("dtype", list(NAMES))
def test_states_wide_enough_for_threads_and_blocks_equal_the_reference(starts, dtype):
    # More columns in a group than are summed at the same time, and heads that no number of threads divides.
    compare(starts, dtype, (19, 64, 40, 1), 0, 1, True, UNLIMITED, True)
    compare(starts, dtype, (5, 64, 128, 2), 3, 2, True, UNLIMITED, True)


def test_token_by_token_a_sequence_equals_the_loop():
    torch.manual_seed(0)
    heads, head_dim, size, groups = 4, 5, 6, 2
    A, D = -torch.rand(heads) * 2 - 0.05, torch.randn(heads)
    sequences = []
    for n in (50, 33, 8):
        x, dt = torch.randn(n, heads, head_dim), torch.rand(n, heads) * 0.3
        B, C = (torch.randn(n, groups, size) * size**-0.5 for _ in range(2))
        y, states = naive_ssd(x, dt, A, B, C, D)
        sequences.append(Known((x, dt, B, C), (y,), {"ssm": by_group(states, groups)}))

    def call(inputs, batch, view):
        x, dt, B, C = inputs
        return (ssd(x, dt, A, B, C, D, batch, view),)

    Rig(ssd_memory(heads, head_dim, size, groups, 1, 2, "float32"), sequences, call, room=3, operations=NATIVE).run([1])
