"""Host memory below the device's buffer, and the copies between the two.

Unit `i` of a kind lies at byte `i * unit_bytes[kind]`, as in the device's buffer. On a GPU the memory is pinned, each
direction has a stream of its own, and events say when copies have landed: no step waits for one. On a CPU, where
tests use it, a copy is made at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, sleep
from weakref import finalize

import numpy as np
import torch

from weft.base.copies import CopyPlan, Direction, Run
from weft.base.errors import InvalidOption
from weft.device.store import Store
from weft.memory.spec import ALIGNMENT

# Bytes copied to measure the rate at the start.
MEASURED_BYTES = 256 << 20
# Without a timed wait for an event, polls stand for it.
WAIT_SECONDS, POLL_SECONDS = 1e-3, 5e-5
TOUCHING_THREADS = 16


@dataclass(frozen=True, slots=True)
class CopyFlight:
    """Copies under way between two events, or on a CPU the seconds that they took."""

    events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    seconds: float = 0.0

    def landed(self, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if under way; with `wait`, wait a little for them."""
        if self.events is None:
            return self.seconds
        start, end = self.events
        until = perf_counter() + (WAIT_SECONDS if wait else 0.0)
        while not end.query():
            if perf_counter() >= until:
                return None
            sleep(POLL_SECONDS)
        return float(start.elapsed_time(end)) / 1000


class HostMemory:
    def __init__(self, store: Store, size_bytes: int) -> None:
        self.store = store
        self._unit_bytes = {kind.value: size for kind, size in store.unit_bytes.items()}
        self._streamed = store.buffer.is_cuda
        size = size_bytes // ALIGNMENT * ALIGNMENT
        # NumPy's zeros cost nothing until they are used.
        self.buffer = pinned(size) if self._streamed else torch.from_numpy(np.zeros(size, np.uint8))
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        if self._streamed:
            # Before the memory goes back to the system, unless the process ends anyway.
            finalize(self, unpin, self.buffer.data_ptr()).atexit = False
            self._streams = {each: torch.cuda.Stream(store.buffer.device) for each in Direction}
        self.load_bytes_per_second = self._measure()

    def copy(self, plan: CopyPlan) -> CopyFlight:
        """Begin the copies of a plan."""
        if not self._streamed:
            began = perf_counter()
            self._copy(plan)
            return CopyFlight(None, perf_counter() - began)
        stream = self._streams[plan.direction]
        if plan.after_steps:
            stream.wait_stream(torch.cuda.current_stream(self.store.buffer.device))
        with torch.cuda.stream(stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._copy(plan)
            end.record()
        return CopyFlight((start, end))

    def copied(self, flight: CopyFlight, wait: bool) -> float | None:
        return flight.landed(wait)

    def close(self) -> None:
        """Do nothing: the memory is released with the object."""

    @property
    def memory(self) -> memoryview:
        """The bytes of this memory."""
        view: memoryview = self.buffer.numpy().data
        return view

    def _copy(self, plan: CopyPlan) -> None:
        for ours, below in self._ranges(plan):
            if plan.direction is Direction.SAVE:
                below.copy_(ours, non_blocking=True)
            else:
                ours.copy_(below, non_blocking=True)

    def _ranges(self, plan: CopyPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of the device and of host memory between which a plan copies."""
        runs = plan.runs() if plan.piece is None else (Run(*unit, 1) for unit in plan.units)
        for kind, upper, lower, count in runs:
            size = self._unit_bytes[kind]
            start, end = (0, count * size) if plan.piece is None else plan.piece
            ours, below = upper * size, lower * size
            yield self.store.buffer[ours + start : ours + end], self.buffer[below + start : below + end]

    def _measure(self) -> float | None:
        """Return the bytes per second of loads, while both memories are still unused."""
        size = min(MEASURED_BYTES, len(self.buffer), len(self.store.buffer))
        if not self._streamed:
            return None
        stream, rates = self._streams[Direction.LOAD], []
        with torch.cuda.stream(stream):
            for _ in range(3):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.store.buffer[:size].copy_(self.buffer[:size], non_blocking=True)
                end.record()
                end.synchronize()
                rates.append(size / (float(start.elapsed_time(end)) / 1000))
        return max(rates)


def unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned(size_bytes: int) -> torch.Tensor:
    """Return zeroed host memory that a GPU copies from and to by itself.

    PyTorch's own allocator would round the size up to a power of two.
    """
    try:
        memory = mmap.mmap(-1, size_bytes)
    except OSError as error:
        raise InvalidOption("host_memory", f"of {size_bytes} bytes cannot be allocated: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    _touch(buffer)
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size_bytes, 0)
    if int(code) != 0:
        raise InvalidOption("host_memory", f"of {size_bytes} bytes cannot be pinned: CUDA error {int(code)}; pass less")
    return buffer


def _touch(buffer: torch.Tensor) -> None:
    """Give memory its pages, with several threads: CUDA would take them one by one while it pins."""
    share = -(-len(buffer) // TOUCHING_THREADS)
    with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
        list(threads.map(torch.Tensor.zero_, buffer.split(max(1, share))))
