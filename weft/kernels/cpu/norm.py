"""RMS norms, plain and gated. The arithmetic is float32 for inputs of any dtype.

Weights that a checkpoint stores zero-centred become 1 + w at load, so there is only one form here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.native import library as native
from weft.kernels.native import norm as kernels
from weft.kernels.outputs import placed, rows_are_lines
from weft.kernels.stream import Change, Normed, Residual


def rms_norm(x: Float[Tensor, "*n size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "*n size"]:
    if x.ndim == 2 and has_kernel(x, weight, x) and x.is_contiguous():
        return kernels.join(x, None, weight, eps)[1]
    return (x * _inverse(x, eps)).mul_(weight).to(x.dtype)


def residual(x: Float[Tensor, "tokens hidden"]) -> Residual:
    return Residual(x, join, add)


def rows_of(x: Normed) -> Float[Tensor, "n size"]:
    """Return x: this package computes norms when the stream is read."""
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
    plain = x.is_contiguous() and all(_is_plain(change, x, weight) for change in changes)
    if changes and plain and has_kernel(x, weight, x):
        for change in changes:
            x, normed = kernels.join(x, change, weight, eps)
        return x, normed
    for change in changes:
        x = add(x, change)
    return x, rms_norm(x, weight, eps)


def _is_plain(change: Change, x: Tensor, weight: Tensor) -> bool:
    same = change.value.dtype == x.dtype and (change.weight is None or change.weight.dtype == weight.dtype)
    return same and change.value.ndim == 2 and change.value.is_contiguous()


def has_kernel(x: Tensor, weight: Tensor, result: Tensor) -> bool:
    """Return whether C++ can do it. No input may be shorter than the result, whose dtype must be supported."""
    kind = result.dtype
    return (
        x.shape[0] > 0
        and native.available()
        and kind in native.DTYPES
        and x.dtype in (kind, torch.float32)
        and weight.dtype in (kind, torch.float32)
    )


def rms_norm_heads(
    x: Float[Tensor, "tokens heads size"], weight: Float[Tensor, "heads size"], eps: float
) -> Float[Tensor, "tokens heads size"]:
    """Norm every head separately, with its own weights."""
    return (x * _inverse(x, eps)).mul_(weight).to(x.dtype)


def gated_rms_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
    out: Float[Tensor, "*n size"] | None = None,
) -> Float[Tensor, "*n size"]:
    """Return norm(x) * silu(gate), or norm(x * silu(gate)) if the gate comes first; normed in `groups` equal parts.

    The result has the gate's dtype: x may be the float32 output of a scan in a bfloat16 model. `out`, if given, is
    filled and returned; its rows need not be adjacent.
    """
    if has_kernel(x, weight, gate) and rows_are_lines(x) and rows_are_lines(gate):
        return kernels.gated_norm(x, gate, weight, eps, groups, gate_first, out)
    opening = F.silu(gate.float())
    if gate_first:
        x = x * opening
    parts = x.unflatten(-1, (groups, -1)) if groups > 1 else x
    normed = parts * _inverse(parts, eps)
    normed = (normed.flatten(-2) if groups > 1 else normed).mul_(weight)
    return placed((normed if gate_first else normed.mul_(opening)).to(gate.dtype), out)


def _inverse(x: Float[Tensor, "*n size"], eps: float) -> Float[Tensor, "*n 1"]:
    """Return one over the root mean square, in float32, so that its product with x is float32 too.

    It uses the vector norm, one pass over x; `F.rms_norm` on a CPU makes three and takes twice as long.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()


@lru_cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
