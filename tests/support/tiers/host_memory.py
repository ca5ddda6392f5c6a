"""Engines with host memory below them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from tests.support.hashed.rolling import rolling_spec
from tests.support.hashed.tiered import TieredDevice, tiered_workload
from tests.support.hashed.workloads import Workload, tight_memory
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.engine.loop import Engine
from weft.engine.request import Request


def two_prompts() -> Workload:
    """Two prompts of which the device's memory holds one."""
    workload = tiered_workload(0)
    spec = rolling_spec(cell=4)
    arrivals = [replace(workload.arrivals[0], prompt=[seed + 5 * i for i in range(16)], count=3) for seed in (1, 2)]
    memory = tight_memory(spec, arrivals, 1.5)
    config = EngineConfig(
        memory_bytes=memory, host_bytes=1 << 16, max_length=32, max_sequences=2, max_tokens_per_step=32, paranoid=True
    )
    return Workload(spec, arrivals, config)


def engine_and_device(workload: Workload) -> tuple[Engine, TieredDevice]:
    config = workload.config
    device = TieredDevice(
        workload.spec, config.memory_bytes, config.max_sequences, False, config.host_bytes, Random("copies")
    )
    device.patience = 1.0
    return Engine(workload.spec, device, config), device


def finish(engine: Engine, prompt: list[int]) -> Report:
    number = engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=3)))
    while not engine.idle:
        engine.step()
    return engine.report(number)
