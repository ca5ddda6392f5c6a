"""The rolling-hash device with host memory and a file below it, and processes that end in the middle of their work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar

from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.tiered import TieredDevice, tiered_workload
from tests.support.hashed.workloads import Run, Workload, check_answers, drive, tight_memory
from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from weft.base.copies import CopyPlan
from weft.engine.loop import Engine
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import DiskLayout
from weft.memory.tiers.disk.tier import DiskCopies
from weft.memory.tiers.tiers import Tiers

E = TypeVar("E", bound=Engine)


class ChainedDevice(TieredDevice):
    """Copies of host memory run late, as in `TieredDevice`; those of the file really run in threads."""

    def __init__(self, workload: Workload, blocks: FlakyBlocks, layout: DiskLayout, random: Random) -> None:
        config = workload.config
        shape = (workload.spec, config.memory_bytes, config.max_sequences, workload.lazy, config.host_bytes)
        super().__init__(*shape, random)
        self.disk = DiskFile(blocks, layout)
        self.copies = DiskCopies(self.disk, self.host_unit)

    def host_unit(self, kind: Kind, unit: int) -> memoryview:
        return memoryview(self.host[kind][unit]).cast("B")

    def copy(self, plan: CopyPlan) -> object:
        return super().copy(plan) if plan.level == 0 else (plan, self.copies.copy(plan))

    def copied(self, ticket: object, wait: bool) -> float | None:
        if not isinstance(ticket, tuple):
            return super().copied(ticket, wait)
        return self.copies.copied(ticket[1], wait)

    def close(self) -> None:
        self.copies.close()


def chained_workload(seed: int) -> Workload | None:
    """A workload whose device and host memory are tight; None if its model cannot use a file."""
    workload, random = tiered_workload(seed), Random(f"chain {seed}")
    if not workload.spec.page_bytes:
        return None
    host = tight_memory(workload.spec, workload.arrivals, random.choice([1.0, 1.5, 4.0]))
    return replace(workload, config=replace(workload.config, host_bytes=host, disk_bytes=1))


def layout_of(workload: Workload, size: int) -> DiskLayout:
    device = RollingDevice(workload.spec, workload.config.memory_bytes, 1)
    rows = {kind: device.memory[kind][:1].nbytes for kind in Kind if kind is not Kind.TAIL and len(device.memory[kind])}
    return DiskLayout.of(IDENTITY, rows, size)


def run_chained(seed: int, kind: type[E] = Engine, prepare: Callable[[Tiers, Random], None] | None = None) -> list[E]:
    """Serve a workload in several processes on one file, each of which closes, is killed, or loses its power."""
    engines: list[E] = []
    workload, random = chained_workload(seed), Random(f"processes {seed}")
    if workload is None:
        return engines
    layout = layout_of(workload, random.choice([1 << 17, 1 << 18, 1 << 20]))
    blocks = FlakyBlocks(layout.size_bytes)
    for _ in range(4):
        device = ChainedDevice(workload, blocks, layout, random)
        engine = kind(workload.spec, device, workload.config)
        engines.append(engine)
        assert engine.ledger.tiers is not None
        for link in engine.ledger.tiers.links:
            for copies in (link.saves, link.loads):
                copies.chunk_bytes = random.choice([1, 600, 1 << 20])
                copies.most_bytes = random.choice([1, 2000, 1 << 20])
        if prepare is not None:
            prepare(engine.ledger.tiers, random)
        run = Run(engine, device)
        drive(workload, run)
        end = random.choice(["close", "kill", "power loss"])
        if random.random() < 0.5:
            engine.write_behind()
        if end == "close":
            engine.close()
        else:
            device.close()
        if end == "close":
            check_answers(workload, run)
        else:
            # Copies may be under way, and what they own is not free.
            for index, arrival in enumerate(workload.arrivals):
                expected = arrival.answer(workload.spec)
                assert run.answers[index] == expected[: len(run.answers[index])], f"request {index} went astray"
        if end == "power loss":
            blocks.pending += [(place, random.randbytes(512)) for place in range(8192, len(blocks.now), 7 * 512)]
            blocks.lose_power(random)
    return engines
