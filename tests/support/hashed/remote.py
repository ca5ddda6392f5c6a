"""A store in memory that loses, delays, repeats and damages, and the rolling-hash device with it below its memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import Random

from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.workloads import Workload
from tests.support.servers.held_steps import SECONDS
from weft.base.copies import CopyPlan
from weft.memory.kinds import Kind
from weft.memory.tiers.remote.store import GuardedStore, ObjectMissing, StoreFailed
from weft.memory.tiers.remote.tier import RemoteCopies


class FakeStore:
    """`faults` is the chance of each kind of fault. While `open` is not set, all calls hang."""

    def __init__(self, random: Random | None = None, faults: float = 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.older: dict[str, bytes] = {}
        self.open = threading.Event()
        self.open.set()
        self.calls: list[str] = []
        self.fails = False
        self._random, self._faults, self._lock = random or Random(0), faults, threading.Lock()

    def _strikes(self) -> bool:
        with self._lock:
            return self._random.random() < self._faults

    def _enter(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
        assert self.open.wait(SECONDS), "the test did not let the store go on"
        if self.fails or self._strikes():
            raise StoreFailed("no answer")

    def put(self, name: str, data: bytes) -> None:
        self._enter("put")
        if self._strikes():
            return  # lost, though it was acknowledged
        with self._lock:
            self.older[name] = self.objects.get(name, data)
            self.objects[name] = bytes(data)

    def get(self, name: str, most_bytes: int) -> bytes:
        self._enter("get")
        with self._lock:
            data = self.objects.get(name)
            if data is None:
                raise ObjectMissing(name)
            if self._random.random() < self._faults:
                data = self._damaged(name, data)
        return data[:most_bytes]

    def _damaged(self, name: str, data: bytes) -> bytes:
        place = self._random.randrange(len(data))
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        other = self._random.choice(list(self.objects.values()))
        return self._random.choice([flipped, data[:place], data + b"more", b"", other, self.older[name]])

    def has(self, name: str) -> bool:
        self._enter("has")
        # Sometimes it remembers what is gone, or does not know yet what is there.
        return (name in self.objects) != self._strikes()

    def names(self, prefix: str) -> Iterator[Sequence[str]]:
        self._enter("names")
        with self._lock:
            found = [name for name in self.objects if name.startswith(prefix)]
        yield found

    def drop(self, names: Sequence[str]) -> None:
        self._enter("drop")
        with self._lock:
            for name in names:
                self.objects.pop(name, None)


class RemoteDevice(RollingDevice):
    """Its copies really run in threads."""

    def __init__(self, workload: Workload, store: FakeStore, guarded: GuardedStore | None = None) -> None:
        config = workload.config
        super().__init__(workload.spec, config.memory_bytes, config.max_sequences, workload.lazy)
        sizes = {
            kind: self.memory[kind][:1].nbytes for kind in Kind if kind is not Kind.TAIL and len(self.memory[kind])
        }
        self.remote = RemoteCopies(guarded or GuardedStore(store), b"h" * 32, sizes, self.unit)
        self.load_bytes_per_second: float | None = None

    def unit(self, kind: Kind, unit: int) -> memoryview:
        return memoryview(self.memory[kind][unit]).cast("B")

    def copy(self, plan: CopyPlan) -> object:
        if plan.after_steps:
            self.execute_all()
        return self.remote.copy(plan)

    def copied(self, flight: object, wait: bool) -> float | None:
        return self.remote.copied(flight, wait)

    def close(self) -> None:
        self.remote.close()
