"""What launches depend on of a GPU: a line for each that was measured; any other is what its driver says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

ROOMY = 208 << 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """Sizes are of one multiprocessor, in bytes."""

    multiprocessors: int
    shared_memory: int  # that one program may have
    starts_early: bool  # kernels may start while the one before them ends (programmatic dependent launch)
    capability: tuple[int, int]

    @property
    def is_roomy(self) -> bool:
        """Whether a program may have the shared memory that cuts for a Hopper GPU need."""
        return self.shared_memory >= ROOMY


H200 = Gpu(multiprocessors=132, shared_memory=227 << 10, starts_early=True, capability=(9, 0))
# GPUs whose kernels were measured, by the names of their drivers.
MEASURED = {"NVIDIA H200": H200}
# On a CPU kernels are interpreted, or compiled for a GPU that is elsewhere.
INTERPRETED = Gpu(multiprocessors=132, shared_memory=227 << 10, starts_early=False, capability=(9, 0))
HOPPER = (9, 0)


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    known = MEASURED.get(torch.cuda.get_device_name(device))
    return known if known is not None else described(torch.cuda.get_device_properties(device))


def described(properties: object) -> Gpu:
    """Return what a device says of itself."""
    capability = (properties.major, properties.minor)
    return Gpu(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        starts_early=capability >= HOPPER,
        capability=capability,
    )
