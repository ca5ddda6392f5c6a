"""Devices place rows that follow drafts in flight as `complete` does, for every number of wrong drafts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from tests.support.kernels.operations import CPU, GPU, PLAIN
from tests.support.kernels.plans import Capture, Row, make_plan
from tests.support.runner.cuda_runner import SPEC
from weft.base.completion import complete
from weft.base.plan import Plan, StepDrafts
from weft.device.store import Store
from weft.kernels.following import DraftSamples
from weft.runner.cuda.padding import Filling, Size, StepInputs

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
        drafts=StepDrafts(
            counts=np.array([0, drafts, 2, 2], np.int32),
            unverified_before=np.array([0, behind, 0, 0], np.int32),
            earlier_slot=np.array([0, 3 if start - behind >= CELL else 0, 0, 0], np.int32),
            earlier_tokens=early,
        ),
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
            known.fill(complete(plan, np.full(4, wrong, np.int32), CELL))
            mine, theirs = (
                replace(each.step.batch, rotary=each.step.batch.positions + 100) for each in (inputs, known)
            )
            operations.move_rows(mine, inputs.step.following, inputs.step.seat, refused, moved)
            assert moved[plan.seat.tolist()].tolist() == [0, wrong, 0, 0]
            for name in ("start", "slot", "positions", "rotary", "first", "token_ids", "closing", "tail"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), (name, start, wrong)
            for name in ("first_piece", "piece_row", "piece_position", "piece_slot"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), (name, start, wrong)
            for name in ("full", "windowed"):
                assert getattr(mine, name).write_page.tolist() == getattr(theirs, name).write_page.tolist(), name


def mixed_plan(random: Random) -> Plan:
    """Some rows of one token, some whose drafts are known, and some that follow up to three drafts in flight."""
    singles, known, followers = (random.randint(least, 3) for least in (0, 1, 0))
    behind = [0] * (singles + known) + [random.randint(1, ROOM) for _ in range(followers)]
    drafts = [0] * singles + [random.randint(1, ROOM) for _ in range(known + followers)]
    rows, captures, early = [], [], np.zeros((len(drafts), ROOM), np.int32)
    for row, (flying, count) in enumerate(zip(behind, drafts, strict=True)):
        start = random.randint(flying, 3 * CELL)
        last, first = -(-(start + 1 + count) // CELL), max(0, start - flying - 9) // CELL
        tokens = [0 if flying or not count else random.randint(1, 2), *(random.randint(1, 2) for _ in range(count))]
        early[row, ROOM - flying :] = [random.randint(1, 2) for _ in range(flying)]
        pages, window = list(range(10 * row, 10 * row + last)), list(range(10 * row + first, 10 * row + last))
        on_board = int(bool(flying) or not count)
        rows.append(Row(start, start + 1 + count, 20 + row, row, row, on_board, pages, window, first, tokens))
        grid = range(-(-(start - flying + 1) // CELL) * CELL, start + count + 2, CELL)
        captures += [Capture(row, position, 40 + row) for position in grid]
    most = max(behind, default=0)
    starts = np.array([row.start for row in rows], np.int32) - np.array(behind, np.int32)
    following = {
        "unverified_before": np.array(behind, np.int32),
        "earlier_slot": np.where((starts >= CELL) & (np.array(behind) > 0), 60 + np.arange(len(rows)), 0).astype(
            np.int32
        ),
        "earlier_tokens": early[:, ROOM - most :],
    }
    return replace(
        make_plan(rows, captures),
        sampled=np.arange(len(rows), dtype=np.int32),
        drafts=StepDrafts(np.array(drafts, np.int32), **(following if most else {})),
    )


def check_mixed_rows(seeds: range) -> None:
    """Rows of one step, whatever their lengths, start and end where the definitions for the host say."""
    scratch = Store(SPEC, 1 << 16, scratch=True).scratch
    size = Size(0, 11, 11 * (ROOM + 1), 11 * (ROOM + 1), longest=ROOM + 1)
    mine, theirs = (StepInputs(size, 11, 10, DRAFTING, scratch, "cpu", PLAIN) for _ in range(2))
    for seed in seeds:
        plan = mixed_plan(random := Random(seed))
        behind = plan.drafts.unverified_before.tolist() or [0] * plan.rows
        wrong = np.array([random.randint(0, count) for count in behind], np.int32)
        refused, moved = torch.zeros(12, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
        refused[plan.seat.tolist()] = torch.from_numpy(wrong)
        placed = complete(plan, wrong, CELL)
        mine.fill(plan)
        theirs.fill(placed)
        batch, step = mine.step.batch, mine.step
        PLAIN.move_rows(batch, step.following, step.seat, refused, moved)
        for name in ("start", "slot", "positions", "first", "token_ids", "closing", "tail", "piece_row", "piece_slot"):
            assert getattr(batch, name).tolist() == getattr(theirs.step.batch, name).tolist(), (name, seed)
        for name in ("full", "windowed"):
            found, wanted = (getattr(each, name).write_page.tolist() for each in (batch, theirs.step.batch))
            assert found == wanted, (name, seed)
        check_verified(random, placed, mine)


def check_verified(random: Random, plan: Plan, inputs: StepInputs) -> None:
    """The board has the token after the last right draft of each row, and leaves that of rows without drafts."""
    chosen = [random.randint(1, 2) for _ in range(plan.sample_count)]
    tokens = torch.tensor(chosen + [0] * (inputs.size.answers - len(chosen)))
    board, refused = torch.full((12,), -1), torch.full((12,), -1, dtype=torch.int32)
    PLAIN.verify_drafts(tokens, inputs.step.batch.token_ids, inputs.step.drafts, board, refused)
    first = sample = 0
    for seat, count in zip(plan.seat.tolist(), plan.drafts.counts.tolist(), strict=True):
        guesses, found = plan.tokens[first + 1 : first + 1 + count].tolist(), chosen[sample : sample + count + 1]
        right = next((place for place, guess in enumerate(guesses) if guess != found[place]), count)
        wanted = (found[right], count - right) if count else (-1, -1)
        assert (int(board[seat]), int(refused[seat])) == wanted, (seat, guesses, found)
        first, sample = first + count + 1, sample + count + 1


def test_rows_of_any_length_in_one_step_are_moved_and_verified_as_on_the_host(monkeypatch):
    check_mixed_rows(range(60))
    # The accepted length of the neighbour row, planted.
    original = Filling._write_drafts

    def shifted(self, host):
        original(self, host)
        line = host[self.inputs.first["drafts.sample"] :][: self.plan.rows]
        line[1:] = line[:-1].copy()

    monkeypatch.setattr(Filling, "_write_drafts", shifted)
    with pytest.raises(AssertionError):
        check_mixed_rows(range(60))


def test_a_lone_row_with_fewer_tokens_than_guesses_is_placed():
    plan = replace(
        make_plan([Row(18, 20, 2, 4, 1, 1, [30, 31], [50, 51], 0, [0, 71])]),
        drafts=StepDrafts(
            counts=np.array([1], np.int32),
            unverified_before=np.array([5], np.int32),
            earlier_slot=np.zeros(1, np.int32),
            earlier_tokens=np.array([[66, 67, 68, 69, 70]], np.int32),
        ),
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
@pytest.mark.parametrize("operations", [PLAIN, GPU, CPU], ids=["plain", "cuda", "cpu"])
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
