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


def early(x: Tensor, wanted: bool = True) -> dict[str, Any]:
    """Settings of a launch whose kernel has a constant EARLY and calls `wait(EARLY)`; `x` is one of its tensors."""
    return EARLY if wanted and is_able(x.device) else NOT_EARLY


@triton.jit
def wait(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
