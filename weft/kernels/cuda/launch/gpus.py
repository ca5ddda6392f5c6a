"""GPU properties that launches depend on: one line per GPU that was measured; for others, what their driver reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ROOMY = 208 << 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU. Sizes are per multiprocessor, in bytes."""

    multiprocessors: int
    shared_memory: int  # maximum of one program
    starts_early: bool  # kernels may start before the previous one ends (programmatic dependent launch)
    capability: tuple[int, int]

    @property
    def is_roomy(self) -> bool:
        """Return whether a program may use the shared memory that tilings for Hopper GPUs need."""
        return self.shared_memory >= ROOMY


H200 = Gpu(multiprocessors=132, shared_memory=227 << 10, starts_early=True, capability=(9, 0))
# Measured GPUs, by the names that their drivers report.
MEASURED = {"NVIDIA H200": H200}
# On a CPU, kernels are interpreted, or compiled for a GPU of another machine.
INTERPRETED = Gpu(multiprocessors=132, shared_memory=227 << 10, starts_early=False, capability=(9, 0))
HOPPER = (9, 0)


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    known = MEASURED.get(torch.cuda.get_device_name(device))
    return known if known is not None else described(torch.cuda.get_device_properties(device))


def described(properties: Any) -> Gpu:
    """Return the properties that a device reports."""
    capability = (properties.major, properties.minor)
    return Gpu(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        starts_early=capability >= HOPPER,
        capability=capability,
    )
