"""RMS norms, plain and gated. The arithmetic is float32 for inputs of any dtype.

Weights that a checkpoint stores zero-centred become 1 + w at load, so there is only one form here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.outputs import placed
from weft.kernels.stream import Change, Normed, Residual


def rms_norm(x: Float[Tensor, "*n size"], weight: Float[Tensor, "*w size"], eps: float) -> Float[Tensor, "*n size"]:
    return (normed(x, eps) * weight).to(x.dtype)


def normed(x: Float[Tensor, "*n size"], eps: float) -> Float[Tensor, "*n size"]:
    """Return x over its root mean square, in float32."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def residual(x: Float[Tensor, "tokens hidden"]) -> Residual:
    return Residual(x, join, add)


def rows_of(x: Normed) -> Float[Tensor, "n size"]:
    assert isinstance(x, Tensor)
    return x


def add(x: Float[Tensor, "n size"], change: Change) -> Float[Tensor, "n size"]:
    value = change.value if change.value.ndim == 2 else change.value.sum(0).to(x.dtype)
    if change.weight is not None:
        value = rms_norm(value, change.weight, change.eps)
    return torch.add(x, value, alpha=change.factor)


def join(
    x: Float[Tensor, "n size"], changes: list[Change], weight: Float[Tensor, " size"], eps: float
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """Return x plus all changes, and the norm of that sum."""
    for change in changes:
        x = add(x, change)
    return x, rms_norm(x, weight, eps)


def gated_rms_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
    out: Float[Tensor, "*n size"] | None = None,
) -> Float[Tensor, "*n size"]:
    opening = F.silu(gate.float())
    x = x * opening if gate_first else x
    y = normed(x.unflatten(-1, (groups, -1)), eps).flatten(-2) * weight
    return placed((y if gate_first else y * opening).to(gate.dtype), out)
