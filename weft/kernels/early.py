"""What a program does for kernels before it imports PyTorch, which takes seconds in which a core is idle."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from weft.kernels.native.compiling import (
    SWITCH,
    KernelBuild,
    Unavailable,
    cache_folder,
    find_compiler,
    needed,
    shipped,
)

log = logging.getLogger("weft")


def begin(device: str) -> None:
    """Compile in the background the C++ kernels that every model needs, if this option will mean a CPU."""
    will_be_cpu = device == "cpu" or (device == "auto" and not has_gpu())
    if will_be_cpu and os.environ.get(SWITCH) != "0":
        threading.Thread(target=compile_common, name="weft-early", daemon=True).start()


def compile_common() -> None:
    try:
        folder = cache_folder()
        if folder is None or shipped() is not None:
            return
        build = KernelBuild(find_compiler(), folder)
        if not build.kept:
            build.begin(needed(build, frozenset()))
    except (Unavailable, OSError) as reason:
        # The start that needs them compiles them, or says why it cannot.
        log.debug("compiling early: %s", reason)


def has_gpu() -> bool:
    """Return whether a driver of NVIDIA has made a device; PyTorch decides later whether it is usable."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
