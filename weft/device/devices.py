"""Devices of this machine: which one to use, its name and its free memory."""

from __future__ import annotations

from time import perf_counter

import torch

from weft.base.errors import ModelError
from weft.base.free_memory import free_memory

# What is read to measure the rate of memory: more than any cache holds, and little beside a model.
RATE_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
RATE_ROUNDS = 6


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


def read_rate(device: str) -> float:
    """Measure how many bytes of its memory a device reads in a second: the best of a few sums."""
    numbers = torch.ones(RATE_BYTES[device] // 4, device=device)
    best = 0.0
    for _ in range(RATE_ROUNDS):
        started = perf_counter()
        # Reading the sum waits for the device.
        numbers.sum().item()
        best = max(best, RATE_BYTES[device] / (perf_counter() - started))
    return best


def free_bytes(device: str = "cpu") -> int:
    """Return the bytes available on a device now."""
    return free_memory() if device == "cpu" else torch.cuda.mem_get_info()[0]
