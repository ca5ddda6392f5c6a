"""Root-mean-square norms: plain and gated. The arithmetic is float32 whatever the dtype of the inputs.

Weights that a checkpoint stores zero-centred are read as 1 + w when they are loaded, so there is only one form here.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def rms_norm(x: Float[Tensor, "*n size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "*n size"]:
    if x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rms_norm_heads(
    x: Float[Tensor, "tokens heads size"], weight: Float[Tensor, "heads size"], eps: float
) -> Float[Tensor, "tokens heads size"]:
    """Every head is normed for itself and has its own weights."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).mul_(weight).to(x.dtype)


def gated_rms_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
) -> Float[Tensor, "*n size"]:
    """norm(x) * silu(gate), or norm(x * silu(gate)) if the gate comes first; normed in `groups` equal parts.

    The result has the gate's dtype: x may be the float32 outcome of a scan in a bfloat16 model.
    """
    x, opening = x.float(), F.silu(gate.float())
    if gate_first:
        x = x * opening
    part = x.shape[-1] // groups
    normed = F.rms_norm(x.unflatten(-1, (groups, part)), (part,), None, eps).flatten(-2).mul_(weight)
    if not gate_first:
        normed = normed.mul_(opening)
    return normed.to(gate.dtype)
