"""Kernels that start while the one before them ends (programmatic dependent launch, from Hopper on).

Until it calls `wait`, such a kernel may only load what is older than the kernel before it: weights, a step's rows,
tails. `wait` returns when all that came before is complete, and lets the next kernel start in its turn.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)
EARLY = {"EARLY": True, "launch_pdl": True}
NOT_EARLY = {"EARLY": False}


@cache
def is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def starts_early(x: Tensor) -> bool:
    """Whether a kernel that `x` is given to may start early: the value of its constant EARLY."""
    return is_able(x.device)


def early(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch whose kernel has a parameter EARLY and calls `wait(EARLY)`."""
    return EARLY if starts_early(x) else NOT_EARLY


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less. (Triton's own takes as long as a launch.)

    >>> power_of_two(1), power_of_two(64), power_of_two(65)
    (1, 64, 128)
    """
    return 1 << (least - 1).bit_length()


@triton.jit
def wait(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int, **constants: Any) -> None:
    """A kernel with the constant EARLY set is launched to start early."""
    pdl = {"launch_pdl": True} if constants.get("EARLY") else {}
    kernel[grid](*arguments, **constants, num_warps=warps, **pdl)
