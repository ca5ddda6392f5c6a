"""Kernels that cost the host little to launch, with named groups of arguments: `@jit` replaces `@triton.jit`, and

    kernel[grid](named(x=x, x_stride=x.stride(0), y=y), rows_of(batch), BLOCK=64, num_warps=4)

launches one. Triton binds, types and specialises all arguments of every launch in Python, which takes longer than
most kernels run. Here a group does that for its own arguments when it is made, so groups that many launches share, such
as a step's rows and a layer's memory, cost nothing again. `Kernel` finds the compiled kernel by a short key and starts
it with raw addresses. Compilation and specialisation stay Triton's: a launch with a new key goes through Triton.
Inside `weft.kernels.cuda.launch.ahead`, launches are collected and compiled instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# Triton versions whose compiled kernels can be started this way; with others every launch goes through Triton.
KNOWN = ("3.6.", "3.7.")
# Marks in a key. Triton specialises on addresses and integers that are multiples of 16, and on integers that are 1.
UNALIGNED, ONE, MULTIPLE, OTHER = "unaligned", "one", "multiple", "other"
LEAST, MOST = -(1 << 31), (1 << 31) - 1


class Arguments:
    """A named group of arguments: consecutive parameters of a kernel. `named` makes one."""

    __slots__ = ("given", "key", "tensor", "values")

    def __init__(self, given: dict[str, Any], key: tuple[Any, ...], tensor: Tensor | None, values: list[Any]) -> None:
        self.given = given
        self.key = key  # differs wherever Triton would recompile
        self.tensor = tensor  # one of them, to find the device
        self.values = values  # with addresses for tensors


def named(**given: Any) -> Arguments:
    """Return a group of arguments, typed and specialised for any number of launches."""
    # This runs for most launches, so it avoids slow operations: attributes, calls, and `isinstance` most of all.
    key: list[Any] = []
    values: list[Any] = []
    tensor: Tensor | None = None
    for argument in given.values():
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            tensor = argument
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
            # The value of a float or boolean does not matter; any other argument is None, or a descriptor.
            key.append(kind if kind is float or kind is bool else argument)
            if kind is TensorDescriptor:
                tensor = argument.base
                key[-1:] = argument.base.dtype, *argument.block_shape
    return Arguments(given, tuple(key), tensor, values)


def jit(function: Callable[..., Any] | None = None, remember: bool = True, **options: Any) -> Any:
    """Decorate like `triton.jit`, for kernels whose last parameters are the constants.

    Kernels that take descriptors must not `remember` launches: Triton converts a descriptor at every launch.
    """
    if function is None:
        return lambda decorated: jit(decorated, remember, **options)
    if not is_known():
        return NamedLaunches(triton.jit(function, **options))
    return Kernel(function, remember, **options)


def is_known() -> bool:
    """Return whether kernels are compiled, by a version of Triton whose launches can be remembered and collected."""
    return not knobs.runtime.interpret and triton.__version__.startswith(KNOWN)


class NamedLaunches:
    """A kernel that is launched with groups of arguments and leaves everything else to Triton or its interpreter."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*groups: Arguments, **settings: Any) -> Any:
            return self.kernel[grid](*checked(self.kernel.arg_names, groups, settings), **settings)

        return launch


class Collecting(threading.local):
    """Collects the launches of one thread: those of others are real. `by` is called instead of launching."""

    # Takes the kernel, the launch's key, its grid, arguments and settings.
    by: Callable[..., None] | None = None


collecting = Collecting()


class Kernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A Triton kernel that caches its compiled launches."""

    # Whether launches are remembered. False for all kernels in comparisons, and while launches are collected.
    remembering = True

    def __init__(self, function: Callable[..., Any], remember: bool = True, **options: Any) -> None:
        super().__init__(function, **options)
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        if not remember:
            self.remembering = False

    def run(self, *groups: Arguments, grid: Any, warmup: bool, **settings: Any) -> Any:
        """Launch the kernel. `settings` are constants and options such as `num_warps`."""
        key, values = specialise(groups, settings)
        found = self.compiled.get(key)
        # A launch hook needs more details than the cache has.
        if found is None or warmup or knobs.runtime.launch_enter_hook.calls or not self.remembering:
            arguments = checked(self.arg_names, groups, settings)
            if collecting.by is not None:
                return collecting.by(self, key, grid, arguments, settings)
            made = super().run(*arguments, grid=grid, warmup=warmup, **settings)
            if made is not None and not warmup and self.remembering:
                constants = (None,) * (len(self.params) - len(values))
                self.compiled[key] = made.run, made.function, made.packed_metadata, constants
            return made
        start, handle, metadata, constants = found
        stream = driver.active.get_current_stream(key[0])
        sides = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        start(*sides, stream, handle, metadata, None, None, None, *values, *constants)
        return None


def checked(parameters: list[str], groups: tuple[Arguments, ...], settings: dict[str, Any]) -> list[Any]:
    """Return the arguments, whose names must be a kernel's parameters in their order, but for those in `settings`."""
    names = [name for group in groups for name in group.given]
    expected = [name for name in parameters if name not in settings]
    if names != expected:
        raise TypeError(f"the kernel takes the arguments {expected}, but was given {names}")
    # By position: Triton has settings of the same names as some parameters.
    return [value for group in groups for value in group.given.values()]


def specialise(groups: tuple[Arguments, ...], settings: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a key that differs wherever Triton would recompile, the device first; and the raw values of all arguments.

    A constant must have the same type in all launches: 1 and True are one key. The first group has a tensor.
    """
    first = groups[0]
    assert first.tensor is not None, "the first group has a tensor"
    values = first.values
    for group in groups[1:]:
        values = values + group.values
    return (first.tensor.get_device(), *settings, *settings.values(), *[group.key for group in groups]), values


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not less. (Triton's version takes as long as a launch.)

    >>> power_of_two(1), power_of_two(64), power_of_two(65)
    (1, 64, 128)
    """
    return 1 << (least - 1).bit_length()


def padded(size: int) -> int:
    """Return a tile size for matmuls: a power of two, at least 16."""
    return max(16, power_of_two(size))


def precision(dtype: torch.dtype) -> str:
    """Return the precision of matmuls: float32 as three TF32 ones is exact enough and uses the tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
