"""What may lie below a hash device, each with a workload that uses it: the table of the laws of tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from tests.support.hashed.chained import ChainedDevice, chained_workload, layout_of, run_chained
from tests.support.hashed.remote import FakeStore, RemoteDevice
from tests.support.hashed.tiered import TieredDevice, make_hasty, run_tiered, tiered_workload
from tests.support.hashed.workloads import Run, Workload, check_answers, drive
from tests.support.tiers.disk_blocks import FlakyBlocks
from tests.support.tiers.disk_tier import nothing, power_loss, run_on_disk
from tests.support.tiers.load_choice import tiers_of
from tests.support.tiers.remote_tier import save_all
from weft.base.copies import CopyPlan
from weft.engine.loop import Engine
from weft.memory.kinds import unit_bytes
from weft.memory.tiers.disk.format import DiskLayout
from weft.memory.tiers.disk.staged_copies import SLOTS, StagedCopies, slot_bytes
from weft.memory.tiers.remote.store import GuardedStore
from weft.memory.tiers.remote.tier import RemoteCopies
from weft.memory.tiers.tiers import Tiers


@dataclass(frozen=True)
class Below:
    """`run` serves a random workload by engines with such tiers, and returns every one after it was used.

    A law holds once each of `wanted` has happened in these engines, and none of `unwanted` may.
    """

    run: Callable[[int], Iterator[Engine]]
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    least_seeds: int = 5


def happened(tiers: Tiers) -> Counter[str]:
    """Return what was loaded from each tier, and what went wrong."""
    found = Counter({link.name: link.loaded_tokens for link in tiers.links})
    found["saved"] = sum(link.saves.bytes for link in tiers.links[-1:])
    found["failed"], found["given up"] = sum(link.failures for link in tiers.links), tiers.given_up
    return found


# host memory ---------------------------------------------------------------------------------------------------------


def in_host_memory(seed: int, prepare: Callable[[Tiers, Random], None] | None = None) -> Iterator[Engine]:
    yield run_tiered(tiered_workload(seed), seed, prepare).engine


# a file --------------------------------------------------------------------------------------------------------------


def in_a_file(
    seed: int, trouble: Callable[[FlakyBlocks, Random], None] = nothing, faults: str = "none"
) -> Iterator[Engine]:
    yield from run_on_disk(seed, trouble, faults)


def in_host_memory_and_a_file(seed: int, prepare: Callable[[Tiers, Random], None] | None = None) -> Iterator[Engine]:
    yield from run_chained(seed, prepare=prepare)


class StagedDevice(ChainedDevice):
    """A hash device with a file below it, and a little host memory that copies pass through."""

    def __init__(self, workload: Workload, blocks: FlakyBlocks, layout: DiskLayout, random: Random) -> None:
        sizes = unit_bytes(workload.spec)
        slot = slot_bytes(workload.spec, sizes, chunk_bytes=600)
        staging = replace(workload.config, host_bytes=2 * SLOTS * slot)
        super().__init__(replace(workload, config=staging), blocks, layout, random)
        device = self

        class Host:
            def copy(self, plan: CopyPlan) -> object:
                return TieredDevice.copy(device, plan)

            def copied(self, ticket: Any, wait: bool) -> float | None:
                return TieredDevice.copied(device, ticket, wait)

        self.staged = StagedCopies(Host(), self.copies, sizes, slot)

    def copy(self, plan: CopyPlan) -> object:
        return self.staged.copy(plan)

    def copied(self, ticket: Any, wait: bool) -> float | None:
        return self.staged.copied(ticket, wait)


def in_a_file_through_a_little_memory(seed: int) -> Iterator[Engine]:
    workload, random = chained_workload(seed), Random(f"staged {seed}")
    if workload is None:
        return
    workload = replace(workload, config=replace(workload.config, host_bytes=0))
    layout = layout_of(workload, 1 << 20)
    blocks = FlakyBlocks(layout.size_bytes)
    for _ in range(2):
        device = StagedDevice(workload, blocks, layout, random)
        engine = Engine(workload.spec, device, workload.config)
        (link,) = tiers_of(engine).links
        link.saves.chunk_bytes = link.loads.chunk_bytes = random.choice([1, 600])
        serve(workload, engine, device)
        engine.close()
        yield engine


# a store -------------------------------------------------------------------------------------------------------------


def guarded(store: FakeStore) -> GuardedStore:
    # A clock that never moves: failures in a row would end everything that is to be tested.
    found = GuardedStore(store, clock=lambda: 1e9)
    found.__dict__["_note"] = lambda failed: None
    return found


def in_a_store(seed: int, faults: float = 0.0) -> Iterator[Engine]:
    """Three engines, one after the other, on one store."""
    workload, random = tiered_workload(seed), Random(f"remote {seed}")
    if not workload.spec.page_bytes:
        return
    workload = replace(workload, config=replace(workload.config, host_bytes=0, remote=True))
    store = FakeStore(random, faults)
    for _ in range(3):
        device = RemoteDevice(workload, store, guarded(store))
        engine = Engine(workload.spec, device, workload.config)
        serve(workload, engine, device)
        save_all(engine)
        engine.close()
        yield engine


# all of them ---------------------------------------------------------------------------------------------------------


class ThreeTierDevice(ChainedDevice):
    """Host memory, a file and a store below a hash device; level 2 is the store."""

    def __init__(self, workload: Workload, blocks: FlakyBlocks, layout: DiskLayout, random: Random, store: FakeStore):
        super().__init__(workload, blocks, layout, random)
        sizes = {kind: self.memory[kind][:1].nbytes for kind in self.host if len(self.memory[kind])}
        self.remote = RemoteCopies(guarded(store), b"h" * 32, sizes, self.host_unit)

    def copy(self, plan: CopyPlan) -> object:
        return [self.remote.copy(plan)] if plan.level == 2 else super().copy(plan)

    def copied(self, ticket: Any, wait: bool) -> float | None:
        return self.remote.copied(ticket[0], wait) if isinstance(ticket, list) else super().copied(ticket, wait)

    def close(self) -> None:
        self.remote.close()
        super().close()


def three_tiers(
    workload: Workload, blocks: FlakyBlocks, store: FakeStore, random: Random, disk_bytes: int = 1 << 20
) -> Engine:
    workload = replace(workload, config=replace(workload.config, disk_bytes=1, remote=True))
    device = ThreeTierDevice(workload, blocks, layout_of(workload, disk_bytes), random, store)
    return Engine(workload.spec, device, workload.config)


def in_three_tiers(seed: int) -> Iterator[Engine]:
    """Two machines with one store, the second of which starts twice."""
    workload, random = chained_workload(seed), Random(f"three {seed}")
    if workload is None:
        return
    store = FakeStore(random, faults=random.choice([0.0, 0.05]))
    size = layout_of(workload, 1 << 18).size_bytes
    mine, other = FlakyBlocks(size), FlakyBlocks(size)
    for blocks in (mine, other, other):
        engine = three_tiers(workload, blocks, store, random, 1 << 18)
        serve(workload, engine, engine._device)
        save_all(engine)
        engine.close()
        yield engine


def serve(workload: Workload, engine: Engine, device: Any) -> None:
    run = Run(engine, device)
    drive(workload, run)
    check_answers(workload, run)


# Copies of a file run in threads, so what happens there differs from run to run.
TIERS = {
    "host memory": Below(in_host_memory, ("host",)),
    "host memory, hasty requests": Below(partial(in_host_memory, prepare=make_hasty), ("host", "given up")),
    "a file": Below(in_a_file, ("disk", "saved"), unwanted=("failed",)),
    "a file, power losses": Below(partial(in_a_file, trouble=power_loss), ("disk", "failed")),
    "a file, torn writes": Below(partial(in_a_file, faults="tears"), ("disk", "failed")),
    "a file, lost syncs": Below(partial(in_a_file, trouble=power_loss, faults="syncs"), ("disk", "failed")),
    "a file through a little memory": Below(in_a_file_through_a_little_memory, ("disk", "saved")),
    "host memory and a file": Below(in_host_memory_and_a_file, ("host", "disk", "saved", "failed")),
    "host memory and a file, hasty requests": Below(
        partial(in_host_memory_and_a_file, prepare=make_hasty), ("host", "given up"), least_seeds=4
    ),
    "a store": Below(in_a_store, ("remote", "saved"), unwanted=("failed",)),
    "a store that loses, fails, repeats and damages": Below(partial(in_a_store, faults=0.1), ("remote", "failed")),
    "host memory, a file and a store": Below(in_three_tiers, ("host", "disk", "remote")),
}
