"""Panels of 16-bit weights as a matrix of float32, and the bias, activation and rounding of sums of float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from struct import Struct

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from weft.kernels.activations import NAMES
from weft.kernels.native.activation import ACTIVATIONS
from weft.kernels.native.calls import call
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.linear import PANEL

WIDEN = Struct("3P4q")
FINISH = Struct("4P9q")


@cache
def team() -> int:
    """Return the address of the function that runs work on PyTorch's threads; 0 if they are not OpenMP's."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def widen(panels: BFloat16[Tensor, "panels inputs 32"], to: Float32[Tensor, "inputs outputs"]) -> None:
    """Write the weights of whole panels to a matrix whose rows are inputs."""
    count, inputs, _ = panels.shape
    assert panels.is_contiguous() and panels.dtype == torch.bfloat16, (panels.shape, panels.dtype)
    assert to.shape == (inputs, count * PANEL) and to.stride(1) == 1 and to.dtype == torch.float32, to.shape
    values = WIDEN.pack(
        panels.data_ptr(), to.data_ptr(), team(), count, inputs, to.stride(0), torch.get_num_threads()
    )  # fmt: skip
    call("weft_widen", values)


def finish(
    sums: Float32[Tensor, "n columns"],
    to: Float[Tensor, "n results"],
    bias: Float[Tensor, " outputs"] | None,
    first: int,
    activation: Callable[[Tensor], Tensor] | None,
    parts: int,
) -> None:
    """Write activation(sums + bias), where `first` is the first output of these sums; rounded once.

    With two parts, activation(gate) * gated, each one half of the sums and of the bias. A part of the sums may be longer
    than a row of results: the numbers beyond are not used.
    """
    rows, count = to.shape
    assert sums.shape[0] == rows and sums.shape[1] >= parts * count and sums.dtype == torch.float32, sums.shape
    assert sums.stride(1) == to.stride(1) == 1, "the numbers of a row must be adjacent"
    assert bias is None or (bias.dtype == to.dtype and bias.stride(0) == 1 and len(bias) // parts >= first + count)
    kind = 0 if activation is None else ACTIVATIONS.index(NAMES[activation])
    values = FINISH.pack(
        sums.data_ptr(), address(None if bias is None else bias[first:]), to.data_ptr(), team(),
        rows, count, sums.stride(0), to.stride(0), sums.shape[1] // 2 if parts == 2 else 0,
        0 if bias is None else len(bias) // 2, kind, DTYPES[to.dtype], torch.get_num_threads(),
    )  # fmt: skip
    call("weft_finish", values)
