"""What this CPU can do that matters to matmuls."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

# Features by the names of /proc/cpuinfo, the most capable first: units for 16-bit matrices, then vector lengths.
UNITS = ("amx_bf16", "avx512_bf16", "bf16")
FEATURES = (*UNITS, "avx512f", "avx2", "avx", "sve", "asimd")

# Restricts kernels to an instruction set, to test and measure what other processors run.
ISA = "WEFT_ISA"


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


def instructions() -> frozenset[str]:
    """Return the names of all sets of instructions of this CPU."""
    found = facts()
    return frozenset((found.get("flags") or found.get("Features") or "").split())


def features() -> tuple[str, ...]:
    """Return the instructions that speed up matmuls here."""
    here = instructions()
    return tuple(each for each in FEATURES if each in here)


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has units for matrices of bfloat16, and kernels may use them.

    oneDNN's own answer is no help: it says yes to AVX-512 without them, and then emulates them.
    """
    return is_unrestricted() and any(unit in UNITS for unit in features())


def is_unrestricted() -> bool:
    """Return whether kernels may use all instructions of this CPU."""
    return os.environ.get(ISA, "native") in ("", "native")
