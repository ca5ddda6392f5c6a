"""What this CPU can do that matters to matmuls."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

# Features by the names of /proc/cpuinfo, the most capable first: units for 16-bit matrices, then vector lengths.
FEATURES = ("amx_bf16", "avx512_bf16", "bf16", "avx512f", "avx2", "avx", "sve", "asimd")


@cache
def facts() -> dict[str, str]:
    """Return the facts of the last CPU in /proc/cpuinfo; empty on systems without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def name() -> str:
    return facts().get("model name") or platform.processor() or platform.machine() or "unknown"


def features() -> tuple[str, ...]:
    """Return the instructions that speed up matmuls here."""
    found = facts()
    here = set((found.get("flags") or found.get("Features") or "").split())
    return tuple(each for each in FEATURES if each in here)
