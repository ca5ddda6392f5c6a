"""Devices place rows that follow drafts in flight as `move_rows` does, for every number of wrong drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.operations import GPU, PLAIN
from tests.plans import Capture, Row, make_plan
from tests.test_cuda_runner import SPEC
from weft.base.moving import move_rows
from weft.base.plan import Plan
from weft.kernels.following import DraftSamples
from weft.memory.device.store import Store
from weft.runner.cuda.padding import Size, StepInputs

ROOM = 3
DRAFTING = replace(SPEC, draft_room=ROOM)
CELL = SPEC.cell


def following_plan(start: int, behind: int, drafts: int) -> Plan:
    """A decode, a row that follows drafts in flight from `start` on, one that follows none, and one that knows all."""
    last = -(-(start + 1 + drafts) // CELL)
    first = max(0, start - behind - 9) // CELL
    pages, window = list(range(30, 30 + last)), list(range(50 + first, 50 + last))
    rows = [
        Row(3, 4, tail=1, seat=5, from_board=1, pages=[4], window_pages=[11]),
        Row(start, start + 1 + drafts, 2, 4, 1, 1, pages, window, first, [0, *range(71, 71 + drafts)]),
        Row(5, 8, tail=5, seat=2, from_board=1, tokens=[0, 8, 9], pages=[15], window_pages=[20]),
        Row(9, 12, read_slot=6, tail=6, seat=3, tokens=[7, 8, 9], pages=[16, 17], window_pages=[21, 22]),
    ]
    grid = range(-(-(start - behind + 1) // CELL) * CELL, start + drafts + 2, CELL)
    captures = [Capture(1, position, 9) for position in grid] + [Capture(2, 8, 8)]
    early = np.zeros((4, behind), np.int32)
    early[1] = range(71 - behind, 71)
    return replace(
        make_plan(rows, captures),
        sampled=np.arange(4, dtype=np.int32),
        drafts=np.array([0, drafts, 2, 2], np.int32),
        behind=np.array([0, behind, 0, 0], np.int32),
        early_slot=np.array([0, 3 if start - behind >= CELL else 0, 0, 0], np.int32),
        early_tokens=early,
    )


def inputs_of(operations: object) -> StepInputs:
    scratch = Store(SPEC, 1 << 16, scratch=True).scratch
    return StepInputs(Size(4, 5, 24, samples=27), 9, 10, DRAFTING, scratch, "cpu", operations)


@pytest.mark.parametrize("operations", [PLAIN, GPU], ids=["plain", "cuda"])
@pytest.mark.parametrize(("behind", "drafts"), [(3, 3), (1, 2)])
def test_rows_are_placed_as_a_plan_for_that_case_says(operations, behind, drafts):
    inputs, known = inputs_of(operations), inputs_of(operations)
    for start in range(CELL + behind - 1, 2 * CELL + behind + 2):
        plan = following_plan(start, behind, drafts)
        for wrong in range(behind + 1):
            refused, moved = (torch.full((10,), 7, dtype=torch.int32) for _ in range(2))
            refused[1] = wrong
            inputs.fill(plan)
            known.fill(move_rows(plan, np.full(4, wrong, np.int32), CELL))
            mine, theirs = inputs.step.batch, known.step.batch
            operations.move_rows(mine, inputs.step.following, inputs.step.seat, refused, moved)
            assert moved[plan.seat.tolist()].tolist() == [0, wrong, 0, 0]
            for name in ("start", "slot", "positions", "first", "token_ids", "closing", "tail"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), (name, start, wrong)
            for name in ("first_piece", "piece_row", "piece_position", "piece_slot"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), (name, start, wrong)
            for name in ("full", "windowed"):
                assert getattr(mine, name).write_page.tolist() == getattr(theirs, name).write_page.tolist(), name


def test_a_lone_row_with_fewer_tokens_than_guesses_is_placed():
    plan = replace(
        make_plan([Row(18, 20, 2, 4, 1, 1, [30, 31], [50, 51], 0, [0, 71])]),
        drafts=np.array([1], np.int32),
        behind=np.array([5], np.int32),
        early_slot=np.zeros(1, np.int32),
        early_tokens=np.array([[66, 67, 68, 69, 70]], np.int32),
    )
    spec = replace(SPEC, cell=16, draft_room=5)
    scratch = Store(spec, 1 << 16, scratch=True).scratch
    inputs = StepInputs(Size(1, 2, 9, samples=9), 9, 10, spec, scratch, "cpu", PLAIN)
    for wrong, guess in enumerate((71, 70, 69, 68, 67, 66)):
        inputs.fill(plan)
        boards = (torch.full((10,), wrong, dtype=torch.int32) for _ in range(2))
        PLAIN.move_rows(inputs.step.batch, inputs.step.following, inputs.step.seat, *boards)
        assert inputs.step.batch.token_ids[1:3].tolist() == [0, guess]
        assert inputs.step.batch.positions[1:3].tolist() == [18 - wrong, 19 - wrong]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("operations", [PLAIN, GPU], ids=["plain", "cuda"])
def test_the_board_gets_the_sample_after_the_last_right_draft(operations, dtype):
    # Two rows without and with one wrong draft, a row without drafts, and one whose first draft is wrong.
    inputs = torch.tensor([0, 10, 11, 0, 20, 21, 22, 0, 0, 30], dtype=torch.int32)
    tokens = torch.tensor([10, 11, 12, 20, 99, 22, 23, 5, 31, 32], dtype=dtype)
    columns = [(4, 3, 1, 0), (0, 3, 7, 8), (0, 3, 7, 8), (2, 3, 0, 1)]
    rows = DraftSamples(*(torch.tensor(values, dtype=dtype) for values in columns), 3)
    board, refused = torch.full((6,), -1), torch.full((6,), -1, dtype=torch.int32)
    operations.verify_drafts(tokens, inputs, rows, board, refused)
    assert board.tolist() == [31, -1, -1, 99, 12, -1]
    assert refused.tolist() == [1, -1, -1, 2, 0, -1]
