"""The CPU cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, capped by the container's quota and OMP_NUM_THREADS.

    More threads than cores make every step 10 to 20 times slower.
    """
    cores = usable_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdigit() and int(wanted) > 0 else cores


def usable_cores() -> int:
    """Return the cores of this process's affinity, capped by the container's quota."""
    cores = len(core_numbers()) or os.cpu_count() or 1
    return max(1, min(cores, quota_cores() or cores))


def quota_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return the whole cores of a control group's quota, if it has one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
