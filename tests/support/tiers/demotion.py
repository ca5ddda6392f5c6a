"""Engines that save to host memory, and count it."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.support.hashed.rolling import VOCABULARY, rolling_spec
from tests.support.hashed.tiered import TieredDevice
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.engine.loop import Engine
from weft.engine.request import Request

SPEC = rolling_spec(cell=4)
PROMPT, ANSWER = 32, 3


class CountingDevice(TieredDevice):
    def __init__(self, memory_bytes: int, host_bytes: int) -> None:
        super().__init__(SPEC, memory_bytes, 4, False, host_bytes, Random("counting"))
        self.patience = 1.0
        self.plans: list[CopyPlan] = []

    def copy(self, plan: CopyPlan) -> object:
        self.plans.append(plan)
        return super().copy(plan)

    @property
    def saves(self) -> list[CopyPlan]:
        return [plan for plan in self.plans if plan.direction is Direction.SAVE]


def engine_with(memory_bytes: int, host_bytes: int = 1 << 20, **changes: object) -> tuple[Engine, CountingDevice]:
    settings = {"max_sequences": 4, "max_tokens_per_step": 64, "max_length": 64, "paranoid": True} | changes
    config = EngineConfig(memory_bytes=memory_bytes, host_bytes=host_bytes, **settings)
    device = CountingDevice(memory_bytes, host_bytes)
    return Engine(SPEC, device, config), device


def prompt(number: int) -> np.ndarray:
    random = Random(f"prompt {number}")
    return np.array([random.randrange(VOCABULARY) for _ in range(PROMPT)], np.int32)


def ask(engine: Engine, number: int) -> Report:
    added = engine.add(Request(prompt(number), SamplingParams(max_tokens=ANSWER, temperature=0.0)))
    while not engine.idle:
        engine.step()
    return engine.report(added)
