"""Hidden states that wait for an MTP head: what is read is what the last step wrote there for that seat."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.plans import Row, make_plan
from tests.support.runner.hidden_states import SEATS, check_states_are_read_as_they_were_written, keeping


def test_states_are_read_as_they_were_written() -> None:
    check_states_are_read_as_they_were_written()


def test_a_row_on_the_board_reads_the_output_of_its_own_seat() -> None:
    states = keeping(torch.float32)
    states.rows.place(make_plan([Row(0, 3, seat=1)]))
    lines = states.rows.find(make_plan([Row(3, 4, seat=2, from_board=1), Row(0, 3, seat=1)]))
    assert lines.tolist()[0] == states.rows.own + 2
    assert set(lines.tolist()[1:]) <= set(range(states.rows.own))
    assert states.rows.padding == states.rows.own + SEATS


def test_states_that_were_not_kept_are_never_read() -> None:
    states = keeping(torch.float32)
    states.rows.place(make_plan([Row(10, 20, seat=1)]))
    for start, end, seat in ((9, 12, 1), (15, 21, 1), (10, 12, 0)):
        with pytest.raises(AssertionError, match="not kept"):
            states.rows.find(make_plan([Row(start, end, seat=seat)]))
