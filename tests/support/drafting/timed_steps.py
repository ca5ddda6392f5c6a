"""Steps whose times are a table: the drafts that pay by it, and what an answer takes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

import numpy as np

from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.plan import Landing, Plan
from weft.runner.cuda.padding import Size
from weft.runner.cuda.recorded import buckets, draft_counts, draft_sizes

ROOM = 7
SPEC = rolling_spec(cell=64, room=ROOM)
# Milliseconds of steps on an H200, by rows: of one, two, four and eight tokens a row.
TOKENS = (1, 2, 4, 8)
Times = Mapping[int, tuple[float, float, float, float]]
# Qwen3.5-35B-A3B. Measured were one row, and one and four tokens of 128 and 256; the others are guesses between.
EXPERTS: Times = {
    1: (2.2, 3.75, 4.2, 5.8),
    8: (6.0, 7.5, 10.5, 15.0),
    32: (12.5, 15.0, 19.0, 25.0),
    128: (20.3, 23.0, 27.2, 37.0),
    256: (24.8, 29.0, 37.7, 55.0),
}
# Of the host, for a step.
HOST = 0.9
# Steps last longer than the table says by about this share.
NOISE = 0.02


class ScriptedDevice(RollingDevice):
    """Accepts drafts by chance. Time passes as on a GPU that computes while the host plans."""

    def __init__(self, rows: int, chances: tuple[float, ...], dearer: float, times: Times, seed: int = 1) -> None:
        super().__init__(SPEC, 1 << 24, rows, lazy=True)
        self.chances, self.dearer, self.times = chances, dearer, times
        self.random, self.noise = np.random.default_rng(seed), np.random.default_rng(5)
        self.now = self.busy_until = 0.0
        self.plain, self.drafted = buckets(rows), draft_sizes(rows, ROOM)
        # Duration of each step, and the drafts of its rows.
        self.steps: list[tuple[float, list[int]]] = []

    def size(self, rows: int, drafts: int) -> Size | None:
        tokens = rows + drafts
        return next((size for size in self.drafted if size.holds(0, rows, tokens, tokens)), None)

    def padded_tokens(self, rows: int, drafts: int) -> int:
        if not drafts:
            return next(each for each in self.plain if each >= rows)
        size = self.size(rows, drafts)
        return self.drafted[-1].tokens + rows + drafts if size is None else size.tokens

    def draft_counts(self, rows: int) -> list[int]:
        return draft_counts(self.drafted, rows)

    def milliseconds(self, rows: int, drafts: int) -> float:
        if not drafts:
            return lasting(self.times, self.padded_tokens(rows, 0), 1)
        size = self.size(rows, drafts)
        assert size is not None, f"no step of {rows} rows with {drafts} drafts is recorded"
        each = size.longer - 1
        plain, found = lasting(self.times, each, 1), lasting(self.times, each, size.answers / each)
        return plain + self.dearer * (found - plain)

    def launch(self, plan: Plan) -> dict:
        self.now += HOST
        flight = super().launch(plan)
        drafts = plan.draft_counts.tolist()
        is_prompt = len(plan.tokens) > plan.rows + sum(drafts)
        took = 20.0 if is_prompt else self.milliseconds(plan.rows, sum(drafts))
        if not is_prompt:
            self.steps.append((took, drafts))
            took *= 1 + abs(self.noise.normal(0, NOISE))
        self.busy_until = max(self.now, self.busy_until) + took
        flight["end"] = self.busy_until
        return flight

    def land(self, flight: dict) -> Landing:
        self.now = max(self.now, flight["end"])
        return super().land(flight)

    def execute(self, plan: Plan) -> Landing:
        plan = self.placed(plan)
        tokens, found = self._tokens(plan), []
        for row in range(plan.rows):
            drafts = int(plan.draft_counts[row])
            right = int(np.cumprod(self.random.random(len(self.chances)) < self.chances).sum())
            own = tokens[row][len(tokens[row]) - drafts :]
            found += [own[place] if place < min(right, drafts) else 7 for place in range(drafts + 1)]
        self.leave_on_board(plan, tokens, found)
        return Landing(np.array(found, np.int32), None, None)


def lasting(times: Times, rows: int, tokens: float) -> float:
    """Milliseconds of a step, between the measured ones."""
    by_tokens = [float(np.interp(rows, list(times), column)) for column in zip(*times.values(), strict=True)]
    return float(np.interp(tokens, TOKENS, by_tokens))


def expected(chances: tuple[float, ...]) -> list[float]:
    """Expected tokens of a row by its number of drafts."""
    return list(accumulate(accumulate(chances, mul), initial=1.0))
