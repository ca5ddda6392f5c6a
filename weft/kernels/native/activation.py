"""Activation of a gate, multiplied by the gated values, and sums, for few rows."""

from __future__ import annotations

from struct import Struct

from jaxtyping import Float
from torch import Tensor

from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES

# By the names of `activations.NAMES`; activation.h uses the same numbers.
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
GATING, ADDITION = Struct("3P7q"), Struct("3P5q")


def gate(
    name: str,
    gates: Float[Tensor, "rows size"],
    x: Float[Tensor, "rows size"],
    out: Float[Tensor, "rows size"] | None = None,
) -> Float[Tensor, "rows size"]:
    """Return activation(gates) * x."""
    rows, size = x.shape
    y = room((rows, size), x.dtype) if out is None else out
    assert y.dtype == x.dtype
    assert y.stride(1) == 1
    values = GATING.pack(
        gates.data_ptr(), x.data_ptr(), y.data_ptr(),
        rows, size, gates.stride(0), x.stride(0), y.stride(0), ACTIVATIONS.index(name), DTYPES[x.dtype],
    )  # fmt: skip
    call("weft_gate", values)
    return y


def add(x: Float[Tensor, "rows size"], y: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    (rows, size), total = x.shape, room(x.shape, x.dtype)
    values = ADDITION.pack(
        x.data_ptr(), y.data_ptr(), total.data_ptr(), rows, size, x.stride(0), y.stride(0), DTYPES[x.dtype]
    )
    call("weft_add", values)
    return total
