"""Devices of this machine: which one to use, its name and its free memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.base.errors import ModelError


def choose_device(asked: str) -> str:
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ModelError("device: no CUDA device is usable; install a driver and a CUDA build of torch, or pass cpu")
    return "cuda" if found and asked != "cpu" else "cpu"


def gpu_count() -> int:
    return torch.cuda.device_count()


def use_gpu(number: int) -> None:
    """Let "cuda" mean this GPU in this process."""
    torch.cuda.set_device(number)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def free_bytes(device: str = "cpu") -> int:
    """Return the bytes available on a device now."""
    return free_memory() if device == "cpu" else torch.cuda.mem_get_info()[0]


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
