"""Kernels that cost the host little to launch: `@jit` replaces `@triton.jit`; `kernel[grid](...)` stays the same.

Triton binds, types and specialises all arguments of every launch in Python, which takes longer than most kernels
run. `Kernel` finds the compiled kernel by a short key and starts it with raw addresses. Compilation and
specialisation stay Triton's: a launch with a new key goes through Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Triton versions whose compiled kernels can be started this way; with others every launch goes through Triton.
KNOWN = ("3.6.", "3.7.")
# Marks in a key. Triton specialises on addresses and integers that are multiples of 16, and on integers that are 1.
UNALIGNED, ONE, MULTIPLE, OTHER = "unaligned", "one", "multiple", "other"
LEAST, MOST = -(1 << 31), (1 << 31) - 1


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate like `triton.jit`, for kernels whose first parameter is a tensor and whose last ones are constants."""
    if function is None:
        return lambda decorated: jit(decorated, **options)
    if knobs.runtime.interpret or not triton.__version__.startswith(KNOWN):
        return triton.jit(function, **options)
    return Kernel(function, **options)


class Kernel(JITFunction):
    """A Triton kernel that caches its compiled launches."""

    # Whether the cache is used; for comparisons.
    remembering = True

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def run(self, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        """Launch the kernel. `settings` are constants and options such as `num_warps`."""
        key, values = specialise(arguments, settings)
        found = self.compiled.get(key)
        # A launch hook needs more details than the cache has.
        if found is None or warmup or knobs.runtime.launch_enter_hook.calls or not self.remembering:
            made = super().run(*arguments, grid=grid, warmup=warmup, **settings)
            if made is not None and not warmup:
                constants = (None,) * (len(self.params) - len(arguments))
                self.compiled[key] = made.run, made.function, made.packed_metadata, constants
            return made
        start, handle, metadata, constants = found
        stream = driver.active.get_current_stream(arguments[0].get_device())
        sides = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        start(*sides, stream, handle, metadata, None, None, None, *values, *constants)
        return None


def specialise(arguments: tuple[Any, ...], settings: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a key that differs wherever Triton would recompile, and the arguments with addresses for tensors.

    A constant must have the same type in all launches: 1 and True are one key.
    """
    key = [arguments[0].get_device(), *settings, *settings.values()]
    values = []
    # This runs for every launch, so it avoids slow operations: calls, and `isinstance` most of all.
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            address = argument.data_ptr()
            values.append(address)
            key.append(argument.dtype)
            if address & 15:
                key.append(UNALIGNED)
            continue
        values.append(argument)
        if kind is int:
            key.append(OTHER if argument & 15 else MULTIPLE)
            if argument == 1:
                key[-1] = ONE
            elif not LEAST <= argument <= MOST:
                key.append(argument)
        else:
            # The value of a float or boolean does not matter; any other argument is None.
            key.append(kind if kind is float or kind is bool else argument)
    return tuple(key), values


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not less. (Triton's version takes as long as a launch.)

    >>> power_of_two(1), power_of_two(64), power_of_two(65)
    (1, 64, 128)
    """
    return 1 << (least - 1).bit_length()
