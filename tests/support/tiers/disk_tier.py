"""Engines with a file below them, on the rolling-hash device and on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.tiered import tiered_workload
from tests.support.hashed.workloads import Run, Workload, check_answers, drive
from tests.support.models.engines import model_of, smallest_memory, spec_of
from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan
from weft.engine.loop import Engine
from weft.memory.identity import Identity
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.format import DiskLayout
from weft.memory.tiers.disk.tier import DiskCopies
from weft.runner.runner import Runner

DISK_BYTES = 16 << 20


def disk_engine(family: str, path: Path, identity: Identity = IDENTITY, **settings: object) -> Engine:
    """An engine on a tiny model whose memory holds one sequence, with a file for many."""
    spec = spec_of(family)
    options = {"max_sequences": 4, "max_tokens_per_step": 512, "max_length": 420, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=smallest_memory(family, 420, 4), disk_bytes=DISK_BYTES, **options)
    runner = Runner(model_of(family), spec, config.memory_bytes, config.max_sequences, threads=1)
    runner.tiers.add_disk(path, DISK_BYTES, identity)
    return Engine(spec, runner, config, closing_seconds=300.0)


def save_all(engine: Engine) -> None:
    """As a server does while it has no requests."""
    engine.write_behind()
    while not engine.idle:
        while not engine.idle:
            engine.step()
        engine.write_behind()


class DiskDevice(RollingDevice):
    """The rolling-hash device with a file in memory below it, whose writes and reads really run in threads."""

    def __init__(self, workload: Workload, blocks: FlakyBlocks, layout: DiskLayout) -> None:
        config = workload.config
        super().__init__(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
        self.disk = DiskFile(blocks, layout)
        self.copies = DiskCopies(self.disk, self.unit)
        self.load_bytes_per_second: float | None = None

    def unit(self, kind: Kind, unit: int) -> memoryview:
        return memoryview(self.memory[kind][unit]).cast("B")

    def copy(self, plan: CopyPlan) -> object:
        if plan.after_steps:
            self.execute_all()
        return self.copies.copy(plan)

    def copied(self, flight: object, wait: bool) -> float | None:
        return self.copies.copied(flight, wait)

    def close(self) -> None:
        self.copies.close()


def disk_layout(workload: Workload, size: int) -> DiskLayout:
    device = RollingDevice(workload.spec, workload.config.memory_bytes, 1)
    rows = {kind: device.memory[kind][:1].nbytes for kind in Kind if kind is not Kind.TAIL and len(device.memory[kind])}
    return DiskLayout.of(IDENTITY, rows, size)


def run_on_disk(seed: int, trouble: Callable[[FlakyBlocks, Random], None], faults: str = "none") -> list[Engine]:
    """Serve a workload, end the process somehow, and serve it again from what is left. Return all engines.

    While it is served, at random, writes stop in the middle and fail (`faults="tears"`), or syncs fail and lose what
    was written before them ("syncs").
    """
    workload, random = tiered_workload(seed), Random(f"disk {seed}")
    if not workload.spec.page_bytes:
        return []
    config = replace(workload.config, host_bytes=0, disk_bytes=1)
    workload = replace(workload, config=config)
    layout = disk_layout(workload, random.choice([1 << 18, 1 << 20]))
    blocks = FlakyBlocks(layout.size_bytes)
    engines: list[Engine] = []
    for _ in range(3):
        device = DiskDevice(workload, blocks, layout)
        run = Run(Engine(workload.spec, device, config, closing_seconds=300.0), device)
        blocks.tear = random if faults == "tears" else None
        blocks.forget = random if faults == "syncs" else None
        drive(workload, run)
        check_answers(workload, run)
        blocks.tear = blocks.forget = None
        engines.append(run.engine)
        device.close()
        trouble(blocks, random)
    return engines


def nothing(blocks: FlakyBlocks, random: Random) -> None:
    """What is there stays."""


def power_loss(blocks: FlakyBlocks, random: Random) -> None:
    # As if nothing had been synced at the end.
    blocks.pending += [(place, bytes(random.randbytes(512))) for place in range(8192, len(blocks.now), 7 * 512)]
    blocks.lose_power(random)
