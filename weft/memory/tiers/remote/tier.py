"""The remote tier: units as objects of a store that engines share, and the copies from and to it.

An object is a unit's header, as in the disk tier's file, and its bytes. Its name begins with the fingerprint of the
model's identity and a digest of its tenant, so that a tenant can be listed and dropped:

    v2-FINGERPRINT/TENANT/page/KEY        /state/KEY        /window/KEY-POSITION

No torch: `units` gives the bytes of a unit in the tier above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from time import perf_counter

from weft.base.copies import CopyPlan, Direction, UnitCopy, UnitLabel
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.file import DamagedUnit
from weft.memory.tiers.disk.format import ENTRY, VERSION, checksum, decode
from weft.memory.tiers.disk.tier import ThreadedCopies, header_of
from weft.memory.tiers.remote.store import GuardedStore, StoreFailed

# Connections for each direction.
GETS, PUTS = 16, 8
# Units of the store that an engine remembers. What it forgets stays in the store, and is found again by asking.
MOST_KNOWN = 1 << 17


def view_bytes(spec: MemorySpec) -> int:
    """Return the size of the cache of what an engine knows to be in a store. Its units stand for objects."""
    return MOST_KNOWN * max(unit_bytes(spec).values())


class ObjectNames:
    """Names of the objects of one model."""

    def __init__(self, fingerprint: bytes) -> None:
        self.place = f"v{VERSION}-{fingerprint.hex()}"

    def of_tenant(self, tenant: bytes | None) -> str:
        """Return what the names of a tenant's objects begin with; None: those of all."""
        return f"{self.place}/" if tenant is None else f"{self.place}/{tenant.hex()}/"

    def of_unit(self, kind: Kind, tenant: bytes, key: bytes, position: int) -> str:
        end = f"-{position}" if kind is Kind.WINDOW else ""
        return f"{self.of_tenant(tenant)}{kind.value}/{key.hex()}{end}"


def encode_unit(copy: UnitCopy, label: UnitLabel, payload: memoryview) -> bytes:
    """Return the object of a unit."""
    header = replace(header_of(copy, label), unit=0, size=len(payload), checksum=checksum(payload))
    return header.encode() + payload


def decode_unit(data: bytes | memoryview, kind: Kind, label: UnitLabel, size: int) -> memoryview:
    """Return the bytes of a unit; raises `DamagedUnit` if an object is not the whole unit of this label."""
    view = memoryview(data)
    header, payload = decode(view[:ENTRY]) if len(view) == ENTRY + size else None, view[ENTRY:]
    good = header is not None and (header.kind, header.key, header.position) == (kind, label.key, label.position)
    if header is None or not good or header.size != size or header.checksum != checksum(payload):
        raise DamagedUnit(f"a {kind} in the remote store is not what its name says")
    return payload


class RemoteCopies:
    """Gets and puts units in threads. Plans of saves run one after the other, and the end of a path is put last."""

    def __init__(
        self,
        store: GuardedStore,
        fingerprint: bytes,
        sizes: Mapping[Kind, int],
        units: Callable[[Kind, int], memoryview],
    ) -> None:
        self.store = store
        self.names = ObjectNames(fingerprint)
        # Measured by the first loads.
        self.load_bytes_per_second: float | None = None
        self._sizes = sizes
        self._units = units
        self._saver = ThreadPoolExecutor(1, "weft-remote-saver")
        self._puts = ThreadPoolExecutor(PUTS, "weft-remote-put")
        self._gets = ThreadPoolExecutor(GETS, "weft-remote-get")

    def copy(self, plan: CopyPlan) -> ThreadedCopies:
        """Begin the copies of a plan."""
        if plan.direction is Direction.SAVE:
            return ThreadedCopies((self._saver.submit(self._save, plan),))
        units = list(zip(plan.units, plan.labels, strict=True))
        return ThreadedCopies(
            tuple(self._gets.submit(self._load, units[first::GETS]) for first in range(min(GETS, len(units))))
        )

    def copied(self, flight: ThreadedCopies, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if under way; with `wait`, wait a little for them."""
        return flight.seconds(wait, (StoreFailed, DamagedUnit))

    def close(self) -> None:
        """Finish what is under way."""
        for pool in (self._saver, self._puts, self._gets):
            pool.shutdown()

    def _save(self, plan: CopyPlan) -> float:
        began = perf_counter()
        units = list(zip(plan.units, plan.labels, strict=True))
        # A state, or the last window page, says that its path is there: it comes after everything else.
        last = {label.key: label.position for copy, label in units if copy.kind == Kind.WINDOW}
        if any(copy.kind == Kind.STATE for copy, _ in units):
            ends = [copy.kind == Kind.STATE for copy, _ in units]
        else:
            ends = [copy.kind == Kind.WINDOW and last[label.key] == label.position for copy, label in units]
        for later in (False, True):
            self._put_all([each for each, is_end in zip(units, ends, strict=True) if is_end is later])
        return perf_counter() - began

    def _put_all(self, units: list[tuple[UnitCopy, UnitLabel]]) -> None:
        parts: list[Future[None]] = [self._puts.submit(self._put, *each) for each in units]
        # The memory that they read is free again when this plan has landed, not earlier.
        wait_for(parts)
        for part in parts:
            part.result()

    def _put(self, copy: UnitCopy, label: UnitLabel) -> None:
        name = self.names.of_unit(Kind(copy.kind), label.tenant, label.key, label.position)
        self.store.put(name, encode_unit(copy, label, self._units(Kind(copy.kind), copy.upper)))

    def _load(self, units: list[tuple[UnitCopy, UnitLabel]]) -> float:
        began = perf_counter()
        for (text, upper, _), label in units:
            kind, size = Kind(text), self._sizes[Kind(text)]
            name = self.names.of_unit(kind, label.tenant, label.key, label.position)
            # One byte more shows an object that is too long.
            data = self.store.get(name, ENTRY + size + 1)
            self._units(kind, upper)[:] = decode_unit(data, kind, label, size)
        return perf_counter() - began
