"""The rolling-hash device with host memory for prompts in files, and engines that save and load them.

Copies are executed late and at random moments: what is read or written too early or too late shows as a wrong hash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.support.hashed.rolling import VOCABULARY, RollingDevice, RoundingDevice
from weft.base.copies import CopyPlan, Direction
from weft.base.sampling import SamplingParams
from weft.engine.device import Capabilities
from weft.engine.events import FinishReason, Output, Report
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.identity import Identity
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.saved.file import SavedModel

IDENTITY = Identity(b"c" * 16, b"w" * 16, b"l" * 16, "test 1")


def saved_model(identity: Identity = IDENTITY) -> SavedModel:
    return SavedModel(identity, VOCABULARY)


@dataclass
class LateCopy:
    plan: CopyPlan
    executed: bool = False


class HashedArea:
    """Host memory beside a device whose units are rows of hashes."""

    load_bytes_per_second: float | None = None

    def __init__(self, device: RollingDevice, size_bytes: int, random: Random) -> None:
        self._device, self._random = device, random
        self._sizes = unit_bytes(device.spec)
        # What nothing was copied to is not zero.
        self._bytes = bytearray(b"\xa5" * size_bytes)

    @property
    def memory(self) -> memoryview:
        return memoryview(self._bytes)

    def copy(self, plan: CopyPlan) -> LateCopy:
        ticket = LateCopy(plan)
        if self._random.random() < 0.3:
            self._execute(ticket)
        return ticket

    def copied(self, ticket: LateCopy, wait: bool) -> float | None:
        if not wait and self._random.random() < 0.5:
            return None
        self._execute(ticket)
        return 1e-6

    def _execute(self, ticket: LateCopy) -> None:
        if ticket.executed:
            return
        ticket.executed = True
        if ticket.plan.after_steps:
            self._device.execute_all()
        for kind, upper, lower in ticket.plan.units:
            row, start = self._device.memory[Kind(kind)][upper], lower * self._sizes[Kind(kind)]
            if ticket.plan.direction is Direction.SAVE:
                unit = self._bytes[start : start + self._sizes[Kind(kind)]]
                unit[:] = bytes(len(unit))
                unit[: row.nbytes] = row.tobytes()
                self._bytes[start : start + len(unit)] = unit
            else:
                row[:] = np.frombuffer(self._bytes, np.uint64, len(row), start)

    def close(self) -> None:
        pass


def saving(kind: type[RollingDevice]) -> type[RollingDevice]:
    """Return a device of a kind that also gives memory for prompts in files."""

    class Saving(kind):  # type: ignore[valid-type, misc]
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, tiers=self)

        def allocate(self, size_bytes: int) -> HashedArea:
            return HashedArea(self, size_bytes, Random("area"))

    return Saving


SavingDevice, SavingRoundingDevice = saving(RollingDevice), saving(RoundingDevice)


def ask(prompt: list[int], count: int, **more: Any) -> Request:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    return Request(np.array(prompt, np.int32), params, **more)


def run(engine: Engine, *requests: Request) -> list[tuple[list[int], Report]]:
    """Run requests together; return what they answer, and their reports."""
    numbers = [engine.add(each) for each in requests]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for output in engine.step():
            found[output.sequence] += [] if output.token is None else [output.token]
    return [(found[number], engine.report(number)) for number in numbers]


def save(engine: Engine, request: Request, path: Path) -> Output:
    """Save a prompt; return how its request ended."""
    number, ended = engine.add(request, save_to=path), None
    while ended is None:
        ended = next((each for each in engine.step() if each.sequence == number and each.finish is not None), None)
    engine.forget(number)
    assert ended.finish in (FinishReason.LENGTH, FinishReason.ERROR)
    return ended


def load(engine: Engine, path: Path, salt: bytes = b"", share: float = 0.0) -> dict[str, Any]:
    """Load a prompt; return the answer."""
    engine.begin_load(7, path, salt, share)
    while not (answers := engine.take_loaded()):
        for output in engine.step():
            raise AssertionError(f"nobody asked for {output}")
    return answers[7]
