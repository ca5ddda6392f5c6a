"""Compiles the C++ kernels of this folder: every source once, side by side, whichever process needs it first.

A start compiles what its model needs. It begins before it imports PyTorch, with what all models need
(`kernels/early.py`), and waits for a source that another start is compiling. The other sources follow in the
background, one at a time and at the lowest priority; then one library of all of them is kept for later starts of any
model, and the compiled sources are removed.

Both lie in the user's cache folder. A file's name has a fingerprint of the sources, the compiler and the CPU, and that
of the library a checksum of its content: a damaged one is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from weft.base.file_locks import lock
from weft.base.processor import ISA
from weft.kernels.native import prebuilt
from weft.kernels.native.flags import FLAGS

log = logging.getLogger("weft")

SWITCH = "WEFT_NATIVE"
COMPILE = "compile"
# Groups of operations with sources of their own, which only some models need; `coded_attention` is for coded pages.
OPTIONAL = frozenset(
    {"attention", "causal_conv", "channel_delta", "coded_attention", "gated_delta", "moe", "ssd", "stored"}
)
# Sources of a group that are not named like it.
GROUP_OF = {"moe_routing": "moe"}
FOLDER = Path(__file__).parent
# The compiler's name of each instruction set.
ISAS = {"native": "native", "sse2": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4", "neon": "armv8-a"}
COMPILERS = ("g++", "clang++", "c++")
# The longest file takes 13 s alone. On a crowded machine 180 s were not enough, and its absence is felt at every step.
COMPILE_SECONDS = 900


class Unavailable(Exception):
    """Reason why there is no library."""


class KernelBuild:
    """The sources, as one compiler translates them for this processor, in a folder that processes share."""

    def __init__(self, compiler: str, folder: Path) -> None:
        self.compiler = compiler
        self.folder = folder
        # Largest first: the longest job must not be the last one to start.
        self.sources = sorted(FOLDER.glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name))
        self.name = fingerprint(compiler, self.sources)
        self.objects = folder / f"objects-{self.name}"

    @property
    def kept(self) -> list[Path]:
        """The libraries of all sources: one, unless it is damaged."""
        return sorted(self.folder.glob(f"kernels-{self.name}-*.so"))

    def link(self, sources: Sequence[Path]) -> Path:
        """Return a library of these sources, which nothing keeps. Those not compiled yet are compiled side by side."""
        self.objects.mkdir(mode=0o700, exist_ok=True)
        missing = [source for source in sources if not self._object(source).exists()]
        if missing:
            self._compile(missing)
        # A name of its own: the dynamic linker takes a second file of one name for the first.
        target = self.objects / f"linked-{secrets.token_hex(8)}.so"
        call([self.compiler, "-shared", "-pthread", *(str(self._object(each)) for each in sources), "-o", str(target)])
        return target

    def keep(self) -> Path:
        """Link all sources, and keep the library instead of whatever there was."""
        useless, built = self.kept, self.link(self.sources)
        target = self.folder / f"kernels-{self.name}-{prebuilt.checksum(built)}.so"
        _move(built, target)
        for path in useless:
            if path != target:
                path.unlink(missing_ok=True)
        self.discard()
        return target

    def discard(self) -> None:
        """Remove the compiled sources."""
        shutil.rmtree(self.objects, ignore_errors=True)

    def complete(self) -> None:
        """Compile what is missing, one source at a time at the lowest priority, and keep the library of all."""
        # A start that needs one of these sources now compiles it too: it must not wait for a low priority.
        with alone(self.folder, "background", wait=False) as is_first:
            for source in self.sources if is_first else ():
                if self.kept:
                    return
                if not self._object(source).exists():
                    self._translate(source, ("nice", "-n", "19") if shutil.which("nice") else ())
        if is_first:
            with alone(self.folder):
                if not self.kept:
                    self.keep()

    def begin(self, sources: Sequence[Path]) -> None:
        """Compile these sources, one at a time, for a start that will link them."""
        self.objects.mkdir(mode=0o700, exist_ok=True)
        for source in sources:
            self._compile_one(source)
        if self.kept:
            # A start that was faster has removed the compiled sources already.
            self.discard()

    def _object(self, source: Path) -> Path:
        return self.objects / f"{source.stem}.o"

    def _compile(self, sources: Sequence[Path]) -> None:
        """Compile sources side by side, with a line in the log for each, or a bar where the log is not shown."""
        log.info("compiling %d files of C++ kernels for this processor; later starts reuse them", len(sources))
        begun, is_logged = time.monotonic(), log.isEnabledFor(logging.DEBUG)
        # `None`: no bar unless standard error is a terminal.
        bar = tqdm(total=len(sources), desc="compiling kernels", unit="file", disable=True if is_logged else None)
        with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
            jobs = [pool.submit(self._compile_one, source) for source in sources]
            for number, job in enumerate(as_completed(jobs), 1):
                job.result()
                bar.update()
                log.debug("compiling kernels: %d of %d, %.0f s", number, len(jobs), time.monotonic() - begun)

    def _compile_one(self, source: Path) -> None:
        """Compile a source, or wait for another start that does."""
        with alone(self.objects, f"{source.stem}.lock"):
            if not self._object(source).exists():
                self._translate(source)

    def _translate(self, source: Path, prefix: Sequence[str] = ()) -> None:
        built = self.objects / f"{source.stem}.{secrets.token_hex(8)}"
        call([*prefix, self.compiler, *flags(), "-c", str(source), "-o", str(built)])
        _move(built, self._object(source))


def needed(build: KernelBuild, groups: Set[str]) -> list[Path]:
    """Return the sources of models that have these groups of operations."""
    unused = OPTIONAL - groups
    return [source for source in build.sources if GROUP_OF.get(source.stem, source.stem) not in unused]


def shipped() -> Path | None:
    """Return the library of a wheel, if there is one for this processor and it may be used."""
    found = None if os.environ.get(SWITCH) == COMPILE else prebuilt.find(instruction_set())
    return None if found is None else found[1]


@contextmanager
def alone(folder: Path, name: str = "lock", wait: bool = True) -> Iterator[bool]:
    """Keep other processes and threads out, or return whether there are none.

    Where files cannot be locked, they repeat work.
    """
    with (folder / name).open("a") as file:
        try:
            lock(file.fileno(), wait)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True


def _move(built: Path, target: Path) -> None:
    """Move a file atomically: a reader finds all of it or nothing, also after the power has failed."""
    with built.open("rb") as file:
        os.fsync(file.fileno())
    built.replace(target)


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise Unavailable(f"no C++ compiler found (looked for {wanted or ', '.join(COMPILERS)})")


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


def call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def fingerprint(compiler: str, sources: Sequence[Path]) -> str:
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
