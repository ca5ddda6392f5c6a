"""What goes on beside the steps, as the engine calls it."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.hashed.tiered import TieredDevice, tiered_workload
from tests.support.hashed.workloads import request_of
from weft.base.errors import EngineStopped
from weft.engine.copying import Copier
from weft.engine.loop import Engine
from weft.memory.dropping import Dropping

HOOKS = ("land", "launch", "launched", "attend", "landed", "close")


class ClosableTieredDevice(TieredDevice):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def make_engine() -> tuple[Engine, ClosableTieredDevice]:
    workload = tiered_workload(1)
    config = workload.config
    device = ClosableTieredDevice(
        workload.spec, config.memory_bytes, config.max_sequences, True, config.host_bytes, Random(1)
    )
    engine = Engine(workload.spec, device, config)
    engine.add(request_of(workload.arrivals[0]))
    return engine, device


def test_a_step_calls_its_companions_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for companion in (Copier, Dropping):
        for hook in HOOKS:

            def note(self, *args: object, name: str = f"{companion.__name__}.{hook}", **more: object) -> None:
                calls.append(name)

            monkeypatch.setattr(companion, hook, note)
    engine, _ = make_engine()
    engine.step()
    # Drops find copies landed, and the next copies begin without what was dropped.
    assert calls[:4] == ["Copier.land", "Dropping.land", "Copier.launch", "Dropping.launch"]
    assert calls[4:8] == ["Copier.launched", "Dropping.launched", "Copier.attend", "Dropping.attend"]
    calls.clear()
    engine.close()
    # What is being dropped is not saved.
    assert calls == ["Dropping.close", "Copier.close"]


def test_a_device_is_closed_even_if_nothing_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Copier) -> None:
        raise EngineStopped("a process has ended")

    monkeypatch.setattr(Copier, "close", fail)
    engine, device = make_engine()
    engine.close()
    assert device.closed == 1
