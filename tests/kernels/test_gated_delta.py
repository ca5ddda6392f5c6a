"""The gated delta rule in extend form, its convolution beside it, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.gated_delta import make_rig
from tests.support.kernels.operations import PLAIN


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("room", [0, 3])
def test_packed_rows_of_any_length_equal_the_loop(key_heads, value_heads, room):
    for seed in range(6):
        rig = make_rig([50, 33, 24, 8, 7, 1, 65], key_heads, value_heads, room=room, seed=seed)
        rig.run([1, 1, 2, 3, 5, 8, 9, 16, 27])


def test_more_rows_than_a_group_holds_equal_the_loop():
    rig = make_rig([*range(2, 40, 2)])
    rig.run([2, 5, 8, 16, 30])


def test_full_cells_of_64_equal_the_loop():
    rig = make_rig([200, 128, 64, 63, 5], cell=64, decay=0.05)
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
    rig = make_rig([50, 33], decay=300.0)
    rig.run([1, 3, 8, 20])


def test_first_row_of_a_sequence_sees_no_earlier_tenant():
    rig = make_rig([20, 20])
    rig.step([(0, 20)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 19)])


def test_a_row_of_nan_stays_alone():
    rig = make_rig([30, 30, 30])
    for tensor in (*rig.sequences[0].inputs, *rig.sequences[0].outputs, *rig.sequences[0].states.values()):
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
