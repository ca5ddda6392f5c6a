"""Norms in one kernel each: a residual stream's addition and norm, and the gated norm behind a recurrent mixer.

A row is always reduced by one program in the same way, so its result does not depend on what is beside it. Roundings
are where the reference has them: after an inner norm, after the addition, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.overlap import early, power_of_two, wait

# Elements that one warp takes on, measured on an H200: of an addition, and of a gated norm; no more warps than this.
PER_WARP = 256
GATED_PER_WARP = 1024
MOST_WARPS = 16
# Elements of a program whose groups are small.
TILE = 1024


def warps_for(elements: int, per_warp: int) -> int:
    return max(1, min(MOST_WARPS, elements // per_warp))


def join(
    x: Float[Tensor, "n size"],
    change: Float[Tensor, "n size"] | None,
    weight: Float[Tensor, " size"],
    eps: float,
    factor: float = 1.0,
    change_weight: Float[Tensor, " size"] | None = None,
    change_eps: float = 0.0,
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """x + factor * change (normed first if it has weights), and the norm of that. Without a change: x, norm(x)."""
    rows, size = x.shape
    normed = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = x if change is None else torch.empty_like(normed)
    assert x.stride(1) == 1
    assert change is None or change.stride(1) == 1
    block = power_of_two(size)
    if rows:
        join_kernel[(rows,)](
            x, change, weight, change_weight, total, normed,
            x.stride(0), 0 if change is None else change.stride(0), size, eps, factor, change_eps,
            BLOCK=block, num_warps=warps_for(block, PER_WARP), **early(x),
        )  # fmt: skip
    return total, normed


@triton.jit
def join_kernel(
    x, change, weight, change_weight, total, normed,
    x_stride, change_stride, size, eps, factor, change_eps,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < size
    dtype = normed.dtype.element_ty
    # All loads first: what is loaded behind a reduction or a store waits for it.
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    if change_weight is not None:
        inner = tl.load(change_weight + column, mask=real, other=0.0).to(tl.float32)
    wait(EARLY)
    value = tl.load(x + row * x_stride + column, mask=real, other=0.0).to(tl.float32)
    if change is not None:
        added = tl.load(change + row * change_stride + column, mask=real, other=0.0).to(tl.float32)
        if change_weight is not None:
            added = added * tl.rsqrt(tl.sum(added * added) / size + change_eps) * inner
            added = added.to(dtype).to(tl.float32)
        value = (value + added * factor).to(dtype)
        tl.store(total + row * size + column, value, mask=real)
        value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / size + eps) * scale
    tl.store(normed + row * size + column, value.to(dtype), mask=real)


def gated_rms_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int,
    gate_first: bool,
) -> Float[Tensor, "*n size"]:
    """x and gate are [tokens, size], or [tokens, heads, size] where heads share the weights; both may be strided."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    shared = gate.ndim == 3
    assert not shared or groups == 1, "heads are groups already"
    x, gate = (t if shared else t.unflatten(-1, (groups, -1)) for t in (x, gate))
    tokens, parts, size = gate.shape
    assert x.stride(2) == gate.stride(2) == 1
    block = power_of_two(size)
    side = min(power_of_two(parts), max(1, TILE // block))
    gated_norm_kernel[(tokens, -(-parts // side))](
        x, gate, weight, out,
        x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), 0 if shared else size, parts, size, eps,
        GATE_FIRST=gate_first, SIDE=side, BLOCK=block, num_warps=warps_for(side * block, GATED_PER_WARP),
        **early(gate),
    )  # fmt: skip
    return out


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out,
    x_token, x_part, gate_token, gate_part, weight_part, parts, size, eps,
    GATE_FIRST: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = (tl.program_id(1) * SIDE + tl.arange(0, SIDE))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    real = (part < parts) & (column < size)
    scale = tl.load(weight + part * weight_part + column, mask=real, other=0.0).to(tl.float32)
    wait(EARLY)
    value = tl.load(x + token * x_token + part * x_part + column, mask=real, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_token + part * gate_part + column, mask=real, other=0.0).to(tl.float32)
    opening = opening * tl.sigmoid(opening)
    if GATE_FIRST:
        value = value * opening
    value = value * tl.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None] * scale
    if not GATE_FIRST:
        value = value * opening
    tl.store(out + (token * parts + part) * size + column, value.to(out.dtype.element_ty), mask=real)
