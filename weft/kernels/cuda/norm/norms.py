"""Norms in one kernel each: a residual stream's addition and norm, and the gated norm after a recurrent mixer.

One program always reduces a row in the same way, so its result does not depend on its neighbours. Roundings are
where the reference has them: after an inner norm, after the addition, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cuda.launch.launching import Arguments, jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.outputs import rows_are_lines
from weft.kernels.stream import Change

# Elements per warp, measured on an H200: for an addition, and for a gated norm; then the maximum number of warps.
PER_WARP = 256
GATED_PER_WARP = 1024
MOST_WARPS = 16
# Elements of a program whose groups are small.
TILE = 1024


def warps_for(elements: int, per_warp: int) -> int:
    return max(1, min(MOST_WARPS, elements // per_warp))


def rms_norm(x: Float[Tensor, "*n size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "*n size"]:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return join(rows, [], weight, eps)[1].view(x.shape)


def add(x: Float[Tensor, "n size"], change: Change) -> Float[Tensor, "n size"]:
    value = change.value if change.value.ndim == 2 else change.value.sum(0).to(x.dtype)
    if change.weight is not None:
        value = rms_norm(value, change.weight, change.eps)
    return torch.add(x, value, alpha=change.factor)


def join(
    x: Float[Tensor, "n size"], changes: list[Change], weight: Float[Tensor, " size"], eps: float
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """Return x plus all changes, and the norm of that sum. The kernel adds at most two; no block has more."""
    for change in changes[:-2]:
        x = add(x, change)
    one, other = (*changes[-2:], None, None)[:2]
    first = NO_FIRST if one is None else first_change(one)
    second = NO_SECOND if other is None else second_change(other)
    rows, size = x.shape
    normed = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed) if changes else x
    assert x.stride(1) == 1
    assert all(change.value.stride(-1) == 1 for change in changes)
    if rows:
        block = power_of_two(size)
        join_kernel[(rows,)](
            named(x=x, x_stride=x.stride(0), size=size, weight=weight, eps=eps, total=total, normed=normed),
            first, second,
            FIRST_PARTS=count_of(changes[-2:], 0), SECOND_PARTS=count_of(changes[-2:], 1),
            BLOCK=block, num_warps=warps_for(block, PER_WARP), **early(x),
        )  # fmt: skip
    return total, normed


def first_change(change: Change) -> Arguments:
    value = change.value
    return named(
        first=value, first_stride=value.stride(-2), first_part=value.stride(0), first_weight=change.weight,
        first_factor=change.factor, first_eps=change.eps,
    )  # fmt: skip


def second_change(change: Change) -> Arguments:
    value = change.value
    return named(
        second=value, second_stride=value.stride(-2), second_part=value.stride(0), second_weight=change.weight,
        second_factor=change.factor, second_eps=change.eps,
    )  # fmt: skip


NO_FIRST = named(
    first=None, first_stride=0, first_part=0, first_weight=None, first_factor=0.0, first_eps=0.0
)  # fmt: skip
NO_SECOND = named(
    second=None, second_stride=0, second_part=0, second_weight=None, second_factor=0.0, second_eps=0.0
)  # fmt: skip


def count_of(changes: list[Change], index: int) -> int:
    """Return the number of parts that a change is the sum of."""
    return len(changes[index].value) if index < len(changes) and changes[index].value.ndim == 3 else 1


@triton.jit
def load_line(pointer, column, real):
    return tl.load(pointer + column, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_change(pointer, part_stride, column, real, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Return the sum of its parts, rounded as a separate matmul would be."""
    value = load_line(pointer, column, real)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            value += load_line(pointer + part * part_stride, column, real)
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit
def normed_line(value, scale, eps, size):
    return value * tl.rsqrt(tl.sum(value * value) / size + eps) * scale


@jit
def join_kernel(
    x, x_stride, size, weight, eps, total, normed,
    first, first_stride, first_part, first_weight, first_factor, first_eps,
    second, second_stride, second_part, second_weight, second_factor, second_eps,
    FIRST_PARTS: tl.constexpr, SECOND_PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < size
    dtype: tl.constexpr = normed.dtype.element_ty
    # Issue all loads first: a load after a reduction or a store waits for it.
    scale = load_line(weight, column, real)
    if first_weight is not None:
        first_scale = load_line(first_weight, column, real)
    if second_weight is not None:
        second_scale = load_line(second_weight, column, real)
    wait(EARLY)
    value = load_line(x + row * x_stride, column, real)
    if first is not None:
        one = load_change(first + row * first_stride, first_part, column, real, FIRST_PARTS, dtype)
        if second is not None:
            other = load_change(second + row * second_stride, second_part, column, real, SECOND_PARTS, dtype)
        # Round where the reference rounds.
        if first_weight is not None:
            one = normed_line(one, first_scale, first_eps, size).to(dtype).to(tl.float32)
        value = (value + one * first_factor).to(dtype).to(tl.float32)
        if second is not None:
            if second_weight is not None:
                other = normed_line(other, second_scale, second_eps, size).to(dtype).to(tl.float32)
            value = (value + other * second_factor).to(dtype).to(tl.float32)
        tl.store(total + row * size + column, value.to(dtype), mask=real)
    tl.store(normed + row * size + column, normed_line(value, scale, eps, size).to(dtype), mask=real)


def gated_rms_norm(
    x: Float[Tensor, "*n size"],
    gate: Float[Tensor, "*n size"],
    weight: Float[Tensor, " size"],
    eps: float,
    groups: int,
    gate_first: bool,
    out: Float[Tensor, "*n size"] | None = None,
) -> Float[Tensor, "*n size"]:
    """Return the gated norm. x and gate are [tokens, size], or [tokens, heads, size] where heads share the weights.

    Both may be strided. `out`, if given, is filled and returned; its tokens need not be adjacent.
    """
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    assert rows_are_lines(out)
    shared = gate.ndim == 3
    assert not shared or groups == 1, "heads are groups already"
    x, gate = (t if shared else t.unflatten(-1, (groups, -1)) for t in (x, gate))
    tokens, parts, size = gate.shape
    assert x.stride(2) == gate.stride(2) == 1
    block = power_of_two(size)
    side = min(power_of_two(parts), max(1, TILE // block))
    gated_norm_kernel[(tokens, -(-parts // side))](
        named(
            x=x, x_token=x.stride(0), x_part=x.stride(1), gate=gate, gate_token=gate.stride(0),
            gate_part=gate.stride(1), weight=weight, weight_part=0 if shared else size,
            out=out, out_token=out.stride(0), parts=parts, size=size, eps=eps,
        ),
        GATE_FIRST=gate_first, SIDE=side, BLOCK=block, num_warps=warps_for(side * block, GATED_PER_WARP),
        **early(gate),
    )  # fmt: skip
    return out


@jit
def gated_norm_kernel(
    x, x_token, x_part, gate, gate_token, gate_part, weight, weight_part, out, out_token, parts, size, eps,
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
    tl.store(out + token * out_token + part * size + column, value.to(out.dtype.element_ty), mask=real)
