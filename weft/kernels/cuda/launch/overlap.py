"""Kernels that start before the previous one ends (programmatic dependent launch, from Hopper on).

Until it calls `wait`, such a kernel may only load what is older than the previous kernel: weights, a step's rows,
tails. `wait` returns when all earlier work is complete, and lets the next kernel start in its turn.

Work on a branch (`weft.kernels.cuda.together`) begins with a kernel that does not start early: this makes whole
steps of a 7B model 2 % faster on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda.launch.gpus import gpu_of

EARLY = {"EARLY": True, "launch_pdl": True}
NOT_EARLY = {"EARLY": False}


def is_able(device: torch.device) -> bool:
    return gpu_of(device).starts_early


def early(x: Tensor, wanted: bool = True) -> dict[str, Any]:
    """Return launch settings for a kernel with a constant EARLY that calls `wait(EARLY)`; `x` is one of its inputs."""
    late, _branch.is_fresh = _branch.is_fresh or _branch.in_full, False
    return EARLY if wanted and not late and is_able(x.device) else NOT_EARLY


@dataclass
class Branch:
    """Whether launches go to a branch, whether it is still empty, and whether kernels wait for previous ones to end."""

    is_open: bool = False
    is_fresh: bool = False
    in_full: bool = False


_branch = Branch()


def on_branch() -> bool:
    return _branch.is_open


@contextmanager
def branching() -> Iterator[None]:
    """Send the launches inside to a branch."""
    _branch.is_open = _branch.is_fresh = True
    try:
        yield
    finally:
        _branch.is_open = _branch.is_fresh = False


@contextmanager
def in_full() -> Iterator[None]:
    """Let each kernel launched inside begin when the previous one has ended: it may read all that that one wrote."""
    before, _branch.in_full = _branch.in_full, True
    try:
        yield
    finally:
        _branch.in_full = before


@cache
def branch_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@triton.jit
def wait(EARLY: tl.constexpr, LET_NEXT_START: tl.constexpr = True):
    """Wait, and let the next kernel start unless this one does so later."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if LET_NEXT_START:
        let_next_start(EARLY)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
