"""The tiers below a device's memory, each of which makes its own copies: host memory, a file, a store, and areas of
host memory for prefixes that come or go.

No torch: a device says where the bytes of its units are, if the host reaches them, and allocates host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, TierCopies
from weft.memory.identity import Identity
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.format import WHOLE, DiskLayout, ModelPart

if TYPE_CHECKING:
    from weft.memory.tiers.disk.file import DiskFile
    from weft.memory.tiers.remote.tier import RemoteCopies

log = logging.getLogger("weft")

# Finds the bytes of a unit of memory.
UnitViews = Callable[[Kind, int], memoryview]


class HostCopies(TierCopies, Protocol):
    """Host memory, and the copies between a device's memory and it."""

    @property
    def memory(self) -> memoryview: ...


class DeviceUnits(Protocol):
    """A device's memory. `memory` is None if threads of the host cannot read and write it in place."""

    unit_bytes: dict[Kind, int]

    @property
    def memory(self) -> memoryview | None: ...


class TiersBelow:
    """The tiers below the memory of a device, by level. `allocate` returns host memory of some bytes."""

    def __init__(self, spec: MemorySpec, units: DeviceUnits, allocate: Callable[[int], HostCopies]) -> None:
        self.levels: list[TierCopies] = []
        self._spec = spec
        self._units = units
        self._allocate = allocate
        self._hosts: dict[int, memoryview] = {}
        self._disk: DiskFile | None = None
        self._remote: RemoteCopies | None = None

    def add(
        self,
        config: EngineConfig,
        disk: Path | None,
        identity: Identity | None,
        remote: str | None = None,
        part: ModelPart = WHOLE,
    ) -> None:
        """Add what a configuration asks for, for this part of the model."""
        if config.host_bytes:
            self.add_host_memory(config.host_bytes)
        if disk is not None:
            assert identity is not None
            self.add_disk(disk, config.disk_bytes, identity, part)
        if remote is not None:
            assert identity is not None
            self.add_remote(remote, identity)
        for size in filter(None, (config.arrivals_bytes, config.departures_bytes)):
            self.add_host_memory(size)

    def add_host_memory(self, size_bytes: int) -> None:
        """Allocate host memory: for what the device evicts, if this is the first tier, else for prefixes in transit."""
        host = self._allocate(size_bytes)
        self._hosts[len(self.levels)] = host.memory
        self.levels.append(host)

    def add_disk(self, path: Path, size_bytes: int, identity: Identity, part: ModelPart = WHOLE) -> None:
        """Open the file for what memory evicts; `path` is the first rank's."""
        from weft.memory.tiers.disk.file import open_file
        from weft.memory.tiers.disk.tier import DiskCopies, check_model

        check_model(self._spec)
        file = open_file(part.path(path), DiskLayout.of(identity, self._units.unit_bytes, size_bytes, part))
        found = f"{len(file.rows)} units found, {file.damaged} damaged headers"
        log.info("disk: %s, %d MiB, %s", part.path(path), file.layout.size_bytes >> 20, found)
        self._disk = file
        self._add_lasting(lambda units: DiskCopies(file, units))

    def add_remote(self, url: str, identity: Identity) -> None:
        """Open the store for what memory evicts."""
        from weft.memory.tiers.disk.tier import check_model
        from weft.memory.tiers.remote.store import GuardedStore, S3Objects
        from weft.memory.tiers.remote.tier import RemoteCopies

        check_model(self._spec, "remote")
        store = GuardedStore(S3Objects(url))
        log.info("remote: only states computed by %s are read; others have other names", identity.revisions)

        def copies_with(units: UnitViews) -> TierCopies:
            self._remote = RemoteCopies(store, identity.fingerprint, self._units.unit_bytes, units)
            return self._remote

        self._add_lasting(copies_with)

    def _add_lasting(self, copies_with: Callable[[UnitViews], TierCopies]) -> None:
        """Add a tier that threads read and write, below host memory or a device's memory that the host reaches.

        Otherwise its copies pass through a little host memory.
        """
        above = next(reversed(self._hosts.values()), self._units.memory)
        if above is not None:
            self.levels.append(copies_with(units_of(above, self._units.unit_bytes)))
            return
        from weft.memory.tiers.disk.staged_copies import SLOTS, StagedCopies, slot_bytes

        sizes = self._units.unit_bytes
        slot = slot_bytes(self._spec, sizes)
        host = self._allocate(2 * SLOTS * slot)
        self.levels.append(StagedCopies(host, copies_with(units_of(host.memory, sizes)), sizes, slot))

    @property
    def disk(self) -> DiskFile:
        assert self._disk is not None
        return self._disk

    @property
    def remote(self) -> RemoteCopies:
        assert self._remote is not None
        return self._remote

    @property
    def load_bytes_per_second(self) -> float | None:
        return self.levels[0].load_bytes_per_second

    @property
    def area(self) -> memoryview:
        """The bytes of the area for prefixes in transit, which is the last tier."""
        return self._hosts[len(self.levels) - 1]

    @property
    def area_units(self) -> Callable[[str, int], memoryview]:
        """Return what finds the bytes of a unit in the area, by its kind and index."""
        units = units_of(self.area, self._units.unit_bytes)
        return lambda kind, unit: units(Kind(kind), unit)

    def allocate(self, size_bytes: int) -> HostCopies:
        return self._allocate(size_bytes)

    def copy(self, plan: CopyPlan) -> Any:
        tier = self.levels[plan.level]
        return tier, tier.copy(plan)

    def copied(self, flight: Any, wait: bool) -> float | None:
        tier, copies = flight
        seconds: float | None = tier.copied(copies, wait)
        return seconds

    def close(self) -> None:
        for tier in self.levels:
            tier.close()


def units_of(memory: memoryview, sizes: Mapping[Kind, int]) -> UnitViews:
    """Return what finds the bytes of a unit in host memory."""
    return lambda kind, unit: memory[unit * sizes[kind] : (unit + 1) * sizes[kind]]
