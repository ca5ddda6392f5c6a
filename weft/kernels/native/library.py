"""C++ kernels of this folder: those that a wheel carries, or compiled once by the machine's own compiler; and loaded.

Without either there is no library: the PyTorch operations run instead, and one warning says so. `WEFT_NATIVE=0`
requests that, and `WEFT_NATIVE=compile` a library for just this CPU where a wheel carries one for many. `WEFT_ISA`
restricts the instruction set. Compiled libraries are kept in the user's cache folder. A file's name has a fingerprint
of the sources, the compiler and the CPU, and a checksum of its content: a damaged one is compiled again.

A compiled library has the sources that the first model of a process needs, unless there is one of all sources already.
It is compiled while weights are loaded (`begin`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from weft.base.processor import ISA
from weft.kernels.native import prebuilt
from weft.kernels.native.flags import FLAGS

log = logging.getLogger("weft")

FOLDER = Path(__file__).parent
SWITCH = "WEFT_NATIVE"
COMPILE = "compile"
# The compiler's name of each instruction set.
ISAS = {"native": "native", "sse2": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4", "neon": "armv8-a"}
COMPILERS = ("g++", "clang++", "c++")
# The longest file takes 13 s alone. On a crowded machine 180 s were not enough, and its absence is felt at every step.
COMPILE_SECONDS = 900
# Groups of operations with a source of their own, which only some models need.
OPTIONAL = frozenset({"attention", "causal_conv", "channel_delta", "gated_delta", "ssd"})
# Names of `float` and `Brain` in the interface; there are no kernels for other types.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Unavailable(Exception):
    """Reason why there is no library."""


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
    """Groups of operations that the models of this process have; all, until one has said what it needs."""

    groups = OPTIONAL
    lock = threading.Lock()


def use(groups: Iterable[str]) -> None:
    """Restrict the library to the sources of these groups, if none is loaded; otherwise extend it if it lacks some."""
    with Wanted.lock:
        wanted = OPTIONAL.intersection(groups)
        if not attempt_for.cache_info().currsize:
            Wanted.groups = wanted
        elif not wanted <= Wanted.groups:
            # Recorded steps keep functions of the first library, which stays loaded.
            Wanted.groups = OPTIONAL
            library.cache_clear()


def begin(groups: Iterable[str]) -> None:
    """Compile or load in the background, while weights are loaded, what these groups of operations need."""
    use(groups)
    threading.Thread(target=attempt, name="weft-native", daemon=True).start()


def attempt() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. The first caller compiles, and others wait for it."""
    with Wanted.lock:
        return attempt_for(Wanted.groups)


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
    """Load a prebuilt library, a kept one of all sources, or one of these groups' sources, or compile that."""
    shipped = None if os.environ.get(SWITCH) == COMPILE else prebuilt.find(instruction_set())
    loaded = None if shipped is None else _open_kept(shipped[1])
    if loaded is not None:
        return loaded
    compiler, kept = find_compiler(), cache_folder()
    found: list[Path] = []
    # Largest first: the longest job must not be the last one to start.
    every = sorted(FOLDER.glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name))
    sources = [source for source in every if source.stem in groups or source.stem not in OPTIONAL]
    for choice in (every, sources):
        stem = f"kernels-{fingerprint(compiler, choice)}"
        found = [] if kept is None else sorted(kept.glob(f"{stem}-*.so"))
        for path in found:
            loaded = _open_kept(path)
            if loaded is not None:
                return loaded
    with tempfile.TemporaryDirectory(dir=kept) as scratch:
        built = Path(scratch) / f"{stem}.so"
        compile_library(compiler, sources, built)
        loaded = _open(built)
        if kept is not None:
            _keep(built, kept / f"{stem}-{prebuilt.checksum(built)}.so", instead_of=found)
    return loaded


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


def _keep(built: Path, target: Path, instead_of: list[Path]) -> None:
    """Move a library to the cache folder atomically. Concurrent processes replace it with an equal one."""
    with built.open("rb") as file:
        os.fsync(file.fileno())
    built.replace(target)
    for useless in instead_of:
        if useless != target:
            useless.unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"cannot load {path}: {error}") from error


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise Unavailable(f"no C++ compiler found (looked for {wanted or ', '.join(COMPILERS)})")


def compile_library(compiler: str, sources: list[Path], target: Path) -> None:
    """Compile the sources side by side, with a line in the log for each, or a bar where the log is not shown."""
    log.info("compiling %d files of C++ kernels for this processor; later starts reuse them", len(sources))
    objects = [target.with_name(source.stem + ".o") for source in sources]
    begun, is_logged = time.monotonic(), log.isEnabledFor(logging.DEBUG)

    def compile_one(source: Path, result: Path) -> None:
        _call([compiler, *flags(), "-c", str(source), "-o", str(result)])

    # `None`: no bar unless standard error is a terminal.
    bar = tqdm(total=len(sources), desc="compiling kernels", unit="file", disable=True if is_logged else None)
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        jobs = [pool.submit(compile_one, *pair) for pair in zip(sources, objects)]
        for number, job in enumerate(as_completed(jobs), 1):
            job.result()
            bar.update()
            log.debug("compiling kernels: %d of %d, %.0f s", number, len(jobs), time.monotonic() - begun)
    _call([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(target)])


def instruction_set() -> str:
    """Return the instruction set that kernels may use: all of this CPU, or the one named by the environment."""
    name = os.environ.get(ISA) or "native"
    if name not in ISAS:
        raise Unavailable(f"{ISA} must be one of {', '.join(ISAS)}, got {name!r}")
    return name


def flags() -> tuple[str, ...]:
    wanted = ISAS[instruction_set()]
    # On ARM, clang takes the name `native` only here.
    on_arm = platform.machine() in ("aarch64", "arm64")
    return (*FLAGS, f"-mcpu={wanted}" if wanted == "native" and on_arm else f"-march={wanted}")


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def fingerprint(compiler: str, sources: list[Path]) -> str:
    """Return a hash of everything that the library depends on: source, flags, compiler and CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [version, " ".join(flags()).encode(), processor().encode()]
    parts += [path.read_bytes() for path in [*sources, *sorted(FOLDER.glob("*.h"))]]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def cache_folder() -> Path | None:
    """Return the user's cache folder; None if other users could write to it, or it is not available."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "weft" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except (OSError, RuntimeError):
        return None
    mine = not hasattr(os, "getuid") or (state.st_uid == os.getuid() and not state.st_mode & 0o022)
    return folder if mine and os.access(folder, os.W_OK) else None


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's values; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
