"""Calls of kernels: with the bytes of one C structure, immediately, and optionally recorded for replay.

C++ defines a structure beside its kernel; Python packs it in the same order. A decode-only step is some hundred
calls with Python in between, whose data the weights evict from the caches each time. A recording holds all calls of
a step with everything that they point to, and replays them without Python.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.kernels.interface import Batch
from weft.kernels.native.compiling import OPTIONAL
from weft.kernels.native.library import library, use

# Rows up to which a recorded step of our matmuls is faster than one with 16-bit units that is not recorded: their
# matmuls alone take 0.75 of the time for 16 rows and 0.35 for 64 (docs/lab/benchmarks.md).
MOST_PREFERRED = 32
# Tensors begin at a multiple of it, as PyTorch's own do.
ALIGNMENT_BYTES = 64


@runtime_checkable
class RenewableValues(Protocol):
    """Values that kernels derive from a step once and point to in their calls. Kept in `Batch.derived`."""

    def renew(self, batch: Batch) -> None:
        """Replace the values in place by those of `batch`."""

    def release(self) -> None:
        """Release what is only needed while calls are made."""


class RecordedMemory:
    """Memory that the calls of recorded steps write to. Steps of a model follow one another, so all of them share it.

    The whole size is reserved at the start; the system commits only what the largest step uses.
    """

    def __init__(self, size_bytes: int) -> None:
        mapped = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes]
        self.taken_bytes = 0

    def begin(self) -> None:
        """Begin a step: it may overwrite what all others have left."""
        self.taken_bytes = 0

    @property
    def suffices(self) -> bool:
        """Whether there was room for everything that the step has taken."""
        return self.taken_bytes <= self._bytes.numel()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        first, size = self.taken_bytes, math.prod(shape) * dtype.itemsize
        self.taken_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not self.suffices:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._bytes[first : first + size].view(dtype).view(*shape)


class Recording:
    """Calls of a step. Another step with as many rows may replay it, with the same model and memory.

    `in_order`: only a recording computes its rows, so kernels are called where others would be faster (`preferred`).
    """

    def __init__(self, memory: RecordedMemory, in_order: bool = False) -> None:
        memory.begin()
        self.memory = memory
        self.in_order = in_order
        self.preferred = False
        self.calls: list[tuple[int, ctypes.Array[ctypes.c_char]]] = []
        self.scratch: Tensor | None = None
        self.pure = True  # everything was computed by calls

    def add(self, name: str, values: bytes) -> None:
        function = ctypes.cast(kernel(name), ctypes.c_void_p).value
        assert function is not None
        self.calls.append((function, ctypes.create_string_buffer(values, len(values))))

    def program(self) -> ctypes.Array[ctypes.c_void_p]:
        """Return the calls as `weft_replay` reads them. Valid no longer than the recording."""
        flat = [number for function, values in self.calls for number in (function, ctypes.addressof(values))]
        return (ctypes.c_void_p * len(flat))(*flat)


_here = threading.local()


def kernel(name: str) -> Any:
    """Return a function of the library by its C name, which takes a structure."""
    loaded = library()
    assert loaded is not None, "ask `available` first"
    return function_of(loaded, name)


@cache
def function_of(loaded: ctypes.CDLL, name: str) -> Any:
    if not hasattr(loaded, name):
        use(OPTIONAL)
        more = library()
        assert more is not None, f"there was a library, and one with {name} cannot be made"
        loaded = more
    found = getattr(loaded, name)
    found.argtypes, found.restype = [ctypes.c_char_p], None
    return found


def call(name: str, values: bytes) -> None:
    recording = getattr(_here, "recording", None)
    if recording is not None:
        recording.add(name, values)
    kernel(name)(values)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Allocate memory that a call writes to. That of a recorded step is valid until the next step."""
    recording = getattr(_here, "recording", None)
    if recording is None:
        return torch.empty(shape, dtype=dtype, device=device)
    found: Tensor = recording.memory.take(shape, dtype)
    return found


def scratch(count: int) -> Tensor:
    """Allocate floats for one call to work with. Calls of a recording follow one another, so they share them."""
    recording = getattr(_here, "recording", None)
    if recording is None:
        return torch.empty(count, dtype=torch.float32, device="cpu")
    if recording.scratch is None or recording.scratch.numel() < count:
        recording.scratch = recording.memory.take([count], torch.float32)
    found: Tensor = recording.scratch
    return found


def prefers_calls(rows: int) -> bool:
    """Return whether to call a kernel with these rows although another routine is faster, because it is recorded."""
    recording = getattr(_here, "recording", None)
    if recording is None or not recording.in_order or rows > MOST_PREFERRED:
        return False
    recording.preferred = True
    return True


@contextmanager
def record(memory: RecordedMemory, in_order: bool = False) -> Iterator[Recording]:
    """Make and record the calls of this thread inside the context."""
    recording = _here.recording = Recording(memory, in_order)
    try:
        with Watch(recording):
            yield recording
    finally:
        _here.recording = None


class Watch(TorchDispatchMode):
    """Detects operators that compute, because a recording would leave them out."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here. Otherwise torch would import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.recording.pure &= computes_nothing(func, args, result)
        return result


def computes_nothing(func: Any, args: Any, result: Any) -> bool:
    """Return whether an operator only allocated memory, or returned a view of its input."""
    if func.namespace != "aten" or func._schema.is_mutable:
        return False
    if func.__name__.startswith(("empty", "new_empty")):
        return True
    made = [x for x in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(x, Tensor)]
    given = [x for x in args if isinstance(x, Tensor)]
    if any(x.is_mkldnn for x in (*made, *given)):
        return False
    places = {x.untyped_storage().data_ptr() for x in given}
    return bool(made) and all(x.untyped_storage().data_ptr() in places for x in made)


def replay(program: ctypes.Array[ctypes.c_void_p]) -> None:
    _replay()(program, len(program) // 2)


@cache
def _replay() -> Any:
    loaded = library()
    assert loaded is not None
    loaded.weft_replay.argtypes, loaded.weft_replay.restype = [ctypes.c_void_p, ctypes.c_long], None
    return loaded.weft_replay
