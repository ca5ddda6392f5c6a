"""Many rows draft on a device whose times are those of recorded sizes."""

from __future__ import annotations

import numpy as np

from benchmarks.drafts import FALLING, ScriptedDrafting
from tests.support.drafting.timed_steps import EXPERTS, SPEC, ScriptedDevice, expected, lasting
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request

ROWS = 256


def first_steps(chances: tuple[float, ...], dearer: float, count: int) -> list[tuple[float, list[int]]]:
    """Duration and drafts of the first steps of 256 rows in a new engine. Every one must have a recorded size."""
    device = ScriptedDevice(ROWS, chances, dearer, EXPERTS)
    config = EngineConfig(memory_bytes=1 << 24, max_sequences=ROWS, max_length=1024, depth=1, cache=False)
    drafting = ScriptedDrafting(chances, fixed=False)
    engine = Engine(SPEC, device, config, drafting=drafting, now=lambda: device.now / 1e3)
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    for number in range(ROWS):
        engine.add(Request(np.full(8, 1 + number, np.int32), params))
    while len(device.steps) < count:
        engine.step()
    return device.steps


def gain(steps: list[tuple[float, list[int]]], chances: tuple[float, ...]) -> float:
    """Expected tokens per millisecond, over those without drafts."""
    tokens = expected(chances)
    rate = sum(tokens[each] for _, drafts in steps for each in drafts) / sum(took for took, _ in steps)
    return rate / (ROWS / lasting(EXPERTS, ROWS, 1))


def check_many_rows_draft_in_recorded_steps_and_miss_none() -> None:
    steps = first_steps(FALLING, 1.0, 45)
    assert {len(drafts) for _, drafts in steps} == {ROWS}, "a row missed a step"
    sizes = {sum(drafts) for _, drafts in steps}
    assert sizes == {0, 256, 512, 768}, "every size is tried and filled"
    assert gain(steps[15:], FALLING) > 1.5
