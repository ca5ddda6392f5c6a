"""How many random workloads a test runs, and what to compare of their plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.workloads import run_and_check
from weft.engine.loop import Engine


def thorough(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def parts(count: int) -> list[object]:
    """Return the parts of a property, each with seeds of its own: one runs by default, one more in CI."""
    marks = [(), pytest.mark.thorough]
    return [pytest.param(part, marks=marks[part] if part < 2 else pytest.mark.slow) for part in range(count)]


def seed_of(part: int, seed: int) -> int:
    """Return a seed below 2**40 as one of a part's own, and as even or odd as it was."""
    return (part << 40) + seed


def record_plans(workload, engine_class: type[Engine] = Engine) -> list:
    seen = []
    original = RollingDevice.launch

    def launch(self, plan):
        seen.append(plan)
        return original(self, plan)

    RollingDevice.launch = launch
    try:
        run_and_check(workload, engine_class)
    finally:
        RollingDevice.launch = original
    return seen


def same_plan(a: object, b: object) -> bool:
    for name in type(a).__slots__ if hasattr(type(a), "__slots__") else ():
        one, other = getattr(a, name), getattr(b, name)
        if hasattr(type(one), "__dataclass_fields__"):
            if not same_plan(one, other):
                return False
        elif not np.array_equal(one, other):
            return False
    return True
