"""Causal convolution in extend form against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.causal_conv import make_rig
from tests.support.kernels.operations import PLAIN


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize(("bias", "activation"), [(True, True), (False, False)])
def test_packed_rows_of_any_length_equal_the_loop(width, bias, activation):
    for seed in range(6):
        rig = make_rig([50, 33, 24, 8, 7, 1, 65], width, bias, activation, seed=seed)
        rig.run([1, 1, 2, 3, 5, 8, 9, 16, 27])


@pytest.mark.parametrize("cell", [2, 8, 64])
def test_windows_may_reach_behind_the_cell(cell):
    rig = make_rig([40, 31], cell=cell)
    rig.run([1, 2, 3])


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
def test_any_chunking_gives_the_same(chunk):
    rig = make_rig([64, 64, 30])
    rig.run([chunk])


def test_first_row_of_a_sequence_sees_no_earlier_tenant():
    rig = make_rig([9, 9], width=4)
    rig.step([(0, 9)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 8)])


def test_rejected_drafts_leave_no_trace():
    for seed in range(8):
        rig = make_rig([60, 55, 50], room=5, seed=seed)
        rig.step([(0, 14), (1, 7), (2, 1)])
        rig.run_with_drafts(6)


def test_bfloat16_sums_are_those_of_float32():
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
