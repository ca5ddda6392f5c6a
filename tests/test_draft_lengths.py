"""The engine chooses as many drafts as pay: held against every fixed number of them, by the costs of a GPU's steps.

No clock is read. A step lasts as long as a table says for the size that it is padded to, and counts for the tokens that
are expected of it, so nothing depends on the machine or on luck.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np
import pytest

from benchmarks.drafts import FALLING, NEVER, ScriptedDrafting
from tests.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.engine import load, loop
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.runner.cuda.padding import Size
from weft.runner.cuda.recorded import buckets, draft_counts, draft_sizes

ROOM = 7
SPEC = rolling_spec(cell=64, room=ROOM)
# Milliseconds of steps of Qwen3.5-9B on an H200, by rows: of one, two, four and eight tokens a row.
TOKENS = (1, 2, 4, 8)
MEASURED = {
    1: (4.13, 5.04, 5.09, 5.14),
    8: (4.76, 5.20, 5.80, 5.97),
    32: (5.47, 6.77, 7.40, 10.38),
    128: (8.13, 13.49, 19.50, 32.95),
}
# Of the host, for a step.
HOST = 0.9
PROMPT, ANSWER, WARM_STEPS = 8, 160, 40


class ScriptedDevice(RollingDevice):
    """Accepts drafts by chance. Time passes as on a GPU that computes while the host plans."""

    def __init__(self, rows: int, chances: tuple[float, ...], dearer: float) -> None:
        super().__init__(SPEC, 1 << 22, rows, lazy=True)
        self.chances, self.dearer = chances, dearer
        self.random = np.random.default_rng(1)
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
            return table(self.padded_tokens(rows, 0), 1)
        size = self.size(rows, drafts)
        assert size is not None, f"no step of {rows} rows with {drafts} drafts is recorded"
        each = size.longer - 1
        plain, found = table(each, 1), table(each, (size.tokens - 1) / each)
        return plain + self.dearer * (found - plain)

    def launch(self, plan: Plan) -> dict:
        self.now += HOST
        flight = super().launch(plan)
        drafts = plan.drafts.tolist() if len(plan.drafts) else [0] * plan.rows
        is_prompt = len(plan.tokens) > plan.rows + sum(drafts)
        took = 20.0 if is_prompt else self.milliseconds(plan.rows, sum(drafts))
        if not is_prompt:
            self.steps.append((took, drafts))
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
            drafts = int(plan.drafts[row]) if len(plan.drafts) else 0
            right = int(np.cumprod(self.random.random(len(self.chances)) < self.chances).sum())
            own = tokens[row][len(tokens[row]) - drafts :]
            found += [own[place] if place < min(right, drafts) else 7 for place in range(drafts + 1)]
        self.leave_on_board(plan, tokens, found)
        return Landing(np.array(found, np.int32), None, None)


def table(rows: int, tokens: float) -> float:
    """Milliseconds of a step, between the measured ones."""
    by_tokens = [float(np.interp(rows, list(MEASURED), column)) for column in zip(*MEASURED.values(), strict=True)]
    return float(np.interp(tokens, TOKENS, by_tokens))


def expected(chances: tuple[float, ...]) -> list[float]:
    """Expected tokens of a row by its number of drafts."""
    return list(accumulate(accumulate(chances, mul), initial=1.0))


def chosen_rate(rows: int, chances: tuple[float, ...], dearer: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Tokens per millisecond that are expected of the steps that the engine chooses, once it has learned."""
    device = ScriptedDevice(rows, chances, dearer)
    for module in (loop, load):
        monkeypatch.setattr(module, "perf_counter", lambda: device.now / 1e3)
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=rows, max_length=512, depth=1, cache=False)
    engine = Engine(SPEC, device, config, drafting=ScriptedDrafting(chances, fixed=False))
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        for number in range(rows):
            engine.add(Request(np.full(PROMPT, 1 + number, np.int32), params))
        while not engine.idle:
            engine.step()
    # Steps of all rows: at the ends of answers there are fewer.
    steps = [(took, drafts) for took, drafts in device.steps[WARM_STEPS:] if len(drafts) == rows]
    tokens = expected(chances)
    return sum(tokens[each] for _, drafts in steps for each in drafts) / sum(took for took, _ in steps)


def fixed_rates(rows: int, chances: tuple[float, ...], dearer: float) -> list[float]:
    """Tokens per millisecond with every fixed number of drafts, none included."""
    device, tokens = ScriptedDevice(rows, chances, dearer), expected(chances)
    return [rows * tokens[each] / device.milliseconds(rows, each * rows) for each in range(ROOM + 1)]


# Eight drafts a row cost eight rows hardly more than four, and the last of them are too rare to be known well.
@pytest.mark.parametrize(("rows", "share"), [(4, 0.99), (8, 0.975), (16, 0.99), (32, 0.99)])
def test_chosen_drafts_are_as_good_as_any_fixed_number(
    rows: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = fixed_rates(rows, FALLING, 1.0)
    assert max(rates) > 1.2 * rates[0], "drafts pay"
    assert chosen_rate(rows, FALLING, 1.0, monkeypatch) >= share * max(rates)


@pytest.mark.parametrize(("chances", "dearer"), [(FALLING, 4.0), (NEVER, 1.0)])
def test_drafts_that_do_not_pay_are_not_chosen(
    chances: tuple[float, ...], dearer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = fixed_rates(32, chances, dearer)
    assert max(rates) == rates[0]
    # A few rows try now and then.
    assert chosen_rate(32, chances, dearer, monkeypatch) >= 0.985 * rates[0]
