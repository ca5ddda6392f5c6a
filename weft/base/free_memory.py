"""How much memory this machine has left."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> int:
    """Return the memory available now: the OS kernel's estimate, capped by the container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit))
