"""Hidden states of steps, read as they were written."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.properties import thorough
from tests.support.kernels.plans import Row, make_plan
from weft.drafting.state_lines import BLOCK, StateLines
from weft.runner.hidden_states import HiddenStates

SEATS, MOST = 3, 5 * BLOCK


def keeping(dtype: torch.dtype) -> HiddenStates:
    states = HiddenStates(StateLines(SEATS, MOST), 1, dtype)
    states.rows.kept_for[:] = True
    return states


def check_random_steps(seed: int) -> None:
    """Compare with a dictionary of what was written, by seat and position."""
    random, states = Random(seed), keeping(torch.float64)
    written: list[dict[int, int]] = [{} for _ in range(SEATS)]
    number = 0
    for _ in range(60):
        seat = random.randrange(SEATS)
        first, end = int(states.rows.first[seat]), int(states.rows.end[seat])
        assert sorted(written[seat]) == list(range(first, end)), "an interval of positions"
        action = random.random()
        if action < 0.1:
            states.rows.forget(seat)
            written[seat].clear()
        elif action < 0.3:
            before = random.randint(first, end + random.choice([0, 0, 20]))
            states.rows.drop(np.array([seat]), np.array([before]))
            written[seat] = {position: line for position, line in written[seat].items() if position >= before}
        elif action < 0.45:
            refused = min(random.randint(0, 7), first)
            states.rows.move(seat, refused)
            written[seat] = {position - refused: line for position, line in written[seat].items()}
        else:
            number = write_step(states, random, written, number)
        read_all(states, written)
        check_blocks(states)


def write_step(states: HiddenStates, random: Random, written: list[dict[int, int]], number: int) -> int:
    """Write a step of some seats: where they end, after wrong drafts, or anywhere else."""
    rows = []
    for seat in random.sample(range(SEATS), random.randint(1, SEATS)):
        first, end = int(states.rows.first[seat]), int(states.rows.end[seat])
        start = random.choice([end, end, max(first, end - random.randint(0, 3)), random.randint(0, 99)])
        rows.append(Row(start, start + random.choice([1, 1, 4, 40, MOST + 1]), seat=seat))
    rows.sort(key=lambda row: row.end - row.start > 1)
    plan = make_plan(rows)
    lines = torch.from_numpy(states.rows.place(plan))
    values = torch.arange(number, number + len(lines), dtype=torch.float64)[:, None]
    states.write(lines, values)
    for row in rows:
        kept = {p: v for p, v in written[row.seat].items() if p < row.start}
        own = {position: number + place for place, position in enumerate(range(row.start, row.end))}
        number += len(own)
        joined = kept if row.start - 1 in kept else {}
        written[row.seat] = joined | own if states.rows.end[row.seat] else {}
    return number


def read_all(states: HiddenStates, written: list[dict[int, int]]) -> None:
    rows = [Row(min(known), max(known) + 1, seat=seat) for seat, known in enumerate(written) if known]
    if rows:
        rows.sort(key=lambda row: row.end - row.start > 1)
        found = states.read(torch.from_numpy(states.rows.find(make_plan(rows))))[:, 0].tolist()
        assert found == [value for row in rows for _, value in sorted(written[row.seat].items())]


def check_blocks(states: HiddenStates) -> None:
    """Every block is free, or one seat's."""
    total = states.rows.own // BLOCK
    width, limit = total, states.rows._limit
    held = [
        int(states.rows._blocks[seat, number % width])
        for seat in range(SEATS)
        for number in range(int(states.rows.first[seat] + states.rows._moved[seat]) // BLOCK, int(limit[seat]) // BLOCK)
    ]
    assert sorted(held + states.rows._free) == list(range(total))


def check_states_are_read_as_they_were_written() -> None:
    @thorough(60)
    @given(seed=st.integers(0, 1 << 40))
    def check(seed: int) -> None:
        check_random_steps(seed)

    check()
