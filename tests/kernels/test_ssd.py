"""The state space recurrence in extend form, its convolution beside it, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.test_causal_conv import naive_conv
from tests.support.kernels.operations import CPU, PLAIN, causal_conv, ssd, ssd_memory
from tests.support.kernels.plans import Known, Rig

HEADS, HEAD_DIM, STATE, CHANNELS, WIDTH = 4, 5, 6, 3, 4


def naive_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs token by token, and the state after every number of tokens read: [heads, state, head_dim]."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    share = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(share, 1), C.repeat_interleave(share, 1)
    state = torch.zeros(x.shape[1], B.shape[2], x.shape[2], dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(x)):
        state = state * torch.exp(dt[t] * A)[:, None, None] + B[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
        outputs.append((C[t][:, :, None] * state).sum(1) + (0 if D is None else D.double()[:, None] * x[t]))
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


def by_group(states: Tensor, groups: int) -> Tensor:
    """States as they lie in slots: [n, groups, state, heads of a group * head_dim]."""
    return states.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)


def make_rig(lengths, groups=2, skip=True, dtype=torch.float32, seed=0, dt_scale=0.3, state=STATE, **options) -> Rig:
    torch.manual_seed(seed)
    A = -torch.rand(HEADS) * 2 - 0.05
    D = torch.randn(HEADS) if skip else None
    weight = torch.randn(CHANNELS, WIDTH)
    sequences = []
    for n in lengths:
        x, line = torch.randn(n, HEADS, HEAD_DIM).to(dtype), torch.randn(n, CHANNELS)
        B, C = (torch.randn(n, groups, state).to(dtype) * state**-0.5 for _ in range(2))
        dt = torch.rand(n, HEADS) * dt_scale
        y, states = naive_ssd(x, dt, A, B, C, D)
        convolved, windows = naive_conv(line, weight, None, False)
        known = {"ssm": by_group(states, groups), "conv": windows}
        sequences.append(Known((x, dt, B, C, line), (y, convolved), known))

    def call(inputs, batch, view):
        x, dt, B, C, line = inputs
        return ssd(x, dt, A, B, C, D, batch, view), causal_conv(line, weight, None, False, batch, view)

    memory = ssd_memory(HEADS, HEAD_DIM, state, groups, CHANNELS, WIDTH, "float32", by=options.get("operations", CPU))
    return Rig(memory, sequences, call, seed=seed, **options)


@pytest.mark.parametrize("operations", [CPU, PLAIN], ids=["cpu", "plain"])
def test_states_may_have_a_size_that_is_no_power_of_two(operations):
    make_rig([50, 33, 7, 1], state=24, operations=operations).run([1, 2, 8, 27])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("room", [0, 3])
def test_packed_rows_of_any_length_equal_the_loop(groups, room):
    for seed in range(6):
        rig = make_rig([50, 33, 24, 8, 7, 1, 65], groups, room=room, seed=seed)
        rig.run([1, 1, 2, 3, 5, 8, 9, 16, 27])


def test_more_rows_than_a_group_holds_equal_the_loop():
    rig = make_rig([*range(2, 40, 2)], skip=False)
    rig.run([2, 5, 8, 16, 30])


def test_full_cells_of_64_equal_the_loop():
    rig = make_rig([200, 128, 64, 63, 5], cell=64, dt_scale=0.05)
    rig.run([1, 7, 64, 65, 128])


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
def test_any_chunking_gives_the_same(chunk):
    rig = make_rig([64, 64, 30])
    rig.run([chunk])


def test_one_sequence_alone_equals_the_loop():
    for room in (0, 3):
        rig = make_rig([70], room=room)
        rig.run([1, 1, 1, 1, 2, 5, 16])


def test_strong_decay_neither_overflows_nor_leaks():
    rig = make_rig([50, 33], dt_scale=200.0)
    rig.tolerance = 1e-4
    rig.run([1, 3, 8, 20])


def test_first_row_of_a_sequence_sees_no_earlier_tenant():
    rig = make_rig([20, 20])
    rig.step([(0, 20)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 19)])


def test_a_row_of_nan_stays_alone():
    rig = make_rig([30, 30, 30])
    for sequence in rig.sequences[:1]:
        for tensor in (*sequence.inputs, *sequence.outputs, *sequence.states.values()):
            tensor.fill_(float("nan"))
    rig.compare = lambda found, answer, what: torch.testing.assert_close(
        found[~answer.isnan()], answer[~answer.isnan()], rtol=2e-5, atol=2e-5, msg=what
    )
    rig.run([1, 2, 5, 8])


def test_rejected_drafts_leave_no_trace():
    for seed in range(8):
        rig = make_rig([60, 55, 50], room=5, seed=seed)
        rig.step([(0, 14), (1, 7), (2, 1)])
        rig.run_with_drafts(6)


def test_bfloat16_inputs_are_computed_in_float32():
    rig = make_rig([50, 20, 9], dtype=torch.bfloat16)
    rig.tolerance = 1e-2
    rig.run([1, 2, 9, 16])


@pytest.mark.parametrize("room", [0, 3])
def test_the_plain_definition_equals_the_loop(room):
    rig = make_rig([50, 33, 24, 8, 7, 1, 65], room=room, operations=PLAIN)
    rig.run([1, 1, 2, 3, 5, 8, 9, 16, 27])


def test_drafts_leave_no_trace_in_the_plain_definition():
    rig = make_rig([60, 40], room=3, operations=PLAIN)
    rig.run_with_drafts(4)
