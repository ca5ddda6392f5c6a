"""C++ kernels of this folder: those that a wheel carries, or compiled once by the machine's own compiler; and loaded.

Without either there is no library: the PyTorch operations run instead, and one warning says so. `WEFT_NATIVE=0`
requests that, and `WEFT_NATIVE=compile` a library for just this CPU where a wheel carries one for many. `WEFT_ISA`
restricts the instruction set.

A library that is compiled at a start (`begin`, while weights are loaded) has the sources that the first model of the
process needs, unless there is one of all sources already. Its code is the same in both, to the bit: they are linked
from the same files (`compiling.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.kernels.native import prebuilt
from weft.kernels.native.compiling import (
    OPTIONAL,
    SWITCH,
    KernelBuild,
    Unavailable,
    alone,
    cache_folder,
    find_compiler,
    needed,
    shipped,
)

log = logging.getLogger("weft")

# Names of `float` and `Brain` in the interface; there are no kernels for other types.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def library() -> ctypes.CDLL | None:
    """Return the loaded library; None, with a warning, if it is not available."""
    found = attempt()
    if isinstance(found, ctypes.CDLL):
        return found
    if os.environ.get(SWITCH) != "0":
        warnings.warn(f"no native kernels, so single streams are slower on the CPU: {found}", stacklevel=2)
    return None


def available() -> bool:
    return library() is not None


# Default limit on the rows of a step that use the kernels.
FEW_ROWS = 64


def suits(numbers: Tensor) -> bool:
    """Return whether these are tokens or positions of a step for native kernels: few, 32-bit, on a CPU."""
    few = numbers.dtype == torch.int32 and numbers.ndim == 1 and 0 < numbers.shape[0] <= FEW_ROWS
    return few and available()


def why_not(dtype: torch.dtype) -> str | None:
    """Return why decodes of this dtype cannot use the kernels; None if they can."""
    found = attempt()
    if isinstance(found, str):
        return found
    return None if dtype in DTYPES else f"there are no kernels for {dtype}"


class Wanted:
    """Groups of operations that the models of this process have. None: all, because no model has named its own."""

    groups: frozenset[str] | None = None
    lock = threading.Lock()


def use(groups: Iterable[str]) -> None:
    """Restrict the library to the sources of these groups, and those named before; if it is loaded, extend it."""
    with Wanted.lock:
        wanted = OPTIONAL.intersection(groups)
        if not attempt_for.cache_info().currsize:
            Wanted.groups = wanted.union(Wanted.groups or ())
        elif Wanted.groups is not None and not wanted <= Wanted.groups:
            # Recorded steps keep functions of the first library, which stays loaded.
            Wanted.groups = None
            library.cache_clear()


def begin(groups: Iterable[str]) -> None:
    """Compile or load in the background, while weights are loaded, what these groups of operations need."""
    use(groups)
    threading.Thread(target=attempt, name="weft-native", daemon=True).start()


def attempt() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. The first caller compiles, and others wait for it."""
    with Wanted.lock:
        return attempt_for(OPTIONAL if Wanted.groups is None else Wanted.groups)


@cache
def attempt_for(groups: frozenset[str]) -> ctypes.CDLL | str:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    try:
        return load(groups)
    except (Unavailable, OSError) as reason:
        return str(reason)


def origin() -> str:
    """Return where the loaded library came from."""
    found = attempt()
    path = Path(found._name) if isinstance(found, ctypes.CDLL) else None
    if path is not None and path.parent == prebuilt.FOLDER:
        return f"prebuilt for {path.name.split('-')[1]}"
    try:
        return f"compiled by {find_compiler()}"
    except Unavailable:  # a kept one of an earlier start
        return "compiled before"


def load(groups: frozenset[str] = OPTIONAL) -> ctypes.CDLL:
    """Load a prebuilt library, a kept one of all sources, or one of these groups' sources, which is compiled."""
    prepared = shipped()
    loaded = None if prepared is None else _open_kept(prepared)
    if loaded is not None:
        return loaded
    compiler, folder = find_compiler(), cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            build = KernelBuild(compiler, Path(scratch))
            return _open(build.link(needed(build, groups)))
    build = KernelBuild(compiler, folder)
    with alone(folder):
        for path in build.kept:
            loaded = _open_kept(path)
            if loaded is not None:
                return loaded
        sources = needed(build, groups)
        if sources == build.sources:
            return _open(build.keep())
        linked = build.link(sources)
        loaded = _open(linked)
        linked.unlink()
    complete_later(build)
    return loaded


def complete_later(build: KernelBuild) -> None:
    """Compile in the background what other models need."""

    def complete() -> None:
        try:
            build.complete()
        except (Unavailable, OSError) as reason:
            # Another process that has kept a library has removed the compiled sources.
            if not build.kept:
                log.warning("compiling the kernels of other models: %s", reason)

    threading.Thread(target=complete, name="weft-kernels", daemon=True).start()


def _open_kept(path: Path) -> ctypes.CDLL | None:
    """Load a library from the cache folder; return None, and log it, if its content has changed."""
    try:
        # Check before loading: mapping half a library can kill the process.
        if prebuilt.checksum(path) != path.stem.rpartition("-")[2]:
            raise Unavailable(f"{path} is damaged: its content does not match the checksum in its name")
        return _open(path)
    except (Unavailable, OSError) as reason:
        log.warning("compiling the kernels: %s", reason)
        return None


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"cannot load {path}: {error}") from error


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's values; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
