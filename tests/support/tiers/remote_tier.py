"""Engines that share a store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.support.hashed.remote import FakeStore, RemoteDevice
from tests.support.hashed.workloads import Workload
from tests.support.tiers.host_memory import two_prompts
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.engine.loop import Engine
from weft.engine.request import Request


def remote_engine(store: FakeStore, workload: Workload | None = None, **settings: object) -> Engine:
    workload = workload or two_prompts()
    config = replace(workload.config, host_bytes=0, remote=True, **settings)
    workload = replace(workload, config=config)
    return Engine(workload.spec, RemoteDevice(workload, store), config)


def finish(engine: Engine, prompt: list[int], salt: bytes = b"") -> Report:
    number = engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=3), salt=salt))
    while not any(output.finish for output in engine.step() if output.sequence == number):
        pass
    return engine.report(number)


def save_all(engine: Engine) -> None:
    engine.write_behind()
    while not engine.idle:
        while not engine.idle:
            engine.step()
        engine.write_behind()


PROMPT = [1 + 5 * i for i in range(16)]
