"""Launching a kernel again and again.

Triton looks at every argument of every launch to see what the kernel must be compiled for, which takes longer than
most kernels run. Here the caller says it by a key: launches with the same key differ in no dtype, no constant, and in
no alignment or integer that the kernel is specialised on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.runtime import driver

# Whether kernels are launched by their handles once they are compiled.
BY_HANDLE = False
# What Triton asks of a pointer.
ALIGNMENT = 16


class Launcher:
    """`launcher(key, grid, arguments, constants, warps)`, with constants in the order of the kernel's parameters.

    A kernel with the constant EARLY set is launched to start early (see overlap.py).
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        compiled = self.compiled.get(key) if BY_HANDLE else None
        if compiled is None:
            early = {"launch_pdl": True} if constants.get("EARLY") else {}
            # Nothing comes back where nothing is compiled, as in Triton's interpreter.
            self.compiled[key] = self.kernel[grid](*arguments, **constants, num_warps=warps, **early)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *constants.values(),
        )  # fmt: skip


def kind_of(tensor: Tensor | None) -> Hashable:
    """What of a tensor a kernel is compiled for."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0)
