"""Work between the QKV projection and attention: norm, rotation, write to pages.

One kernel reads the projection once, returns queries, and writes keys and values straight into their pages. Another
computes a step's cosines and sines.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.cuda.attention.pages import coded, exponent_for, size_of
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation


class RotaryTile(NamedTuple):
    elements: int  # per program
    warps: int


# Minimum elements of a warp: all threads load 16 bytes of 16-bit numbers.
PER_WARP = 256
# Measured on an H200: in decode-only steps, and in others.
DECODE_TILE, STEP_TILE = RotaryTile(1024, 4), RotaryTile(512, 1)


def make_rotation(
    positions: Int[Tensor, " tokens"], frequency: Float[Tensor, " half"], scale: float, dtype: torch.dtype
) -> Rotation:
    tokens, half = len(positions), len(frequency)
    cosine, sine = (torch.empty(tokens, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if tokens:
        rotation_kernel[(tokens,)](
            named(positions=positions, frequency=frequency, cosine=cosine, sine=sine, scale=scale, half=half),
            BLOCK=power_of_two(half), num_warps=1,
        )  # fmt: skip
    return Rotation(cosine, sine)


@jit(**STEP)
def rotation_kernel(positions, frequency, cosine, sine, scale, half, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    real = pair < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequency + pair, mask=real, other=0.0)
    across = (tl.cos(angle) * scale).to(cosine.dtype.element_ty)
    along = (tl.sin(angle) * scale).to(sine.dtype.element_ty)
    place = token * 2 * half + pair
    tl.store(cosine + place, across, mask=real)
    tl.store(cosine + place + half, across, mask=real)
    tl.store(sine + place, -along, mask=real)
    tl.store(sine + place + half, along, mask=real)


def rotate_and_write(
    projected: Float[Tensor, "tokens projected head_dim"],
    heads: int,
    weight: Float[Tensor, "turning head_dim"] | None,
    eps: float,
    rotation: Rotation | None,
    batch: Batch,
    view: AttentionView,
    by: RotaryTile | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Return the queries, normed (if there are weights) and rotated; write such keys, and values, to their pages.

    `projected` holds the query heads, then the key heads, then the value heads; anything after them is ignored. `by`
    fixes the tile, and with it the order of a norm's sum; by default the kind of step decides.
    """
    cell, kv_heads, head_dim = view.keys.shape[1:]
    tokens = len(projected)
    assert projected.stride(1) == head_dim
    assert projected.stride(2) == 1
    half = 0 if rotation is None else rotation.cosine.shape[-1] // 2
    rest = head_dim - 2 * half
    queries = torch.empty(tokens, heads, head_dim, dtype=projected.dtype, device=projected.device)
    every = heads + 2 * kv_heads
    tile, warps = by or (STEP_TILE if batch.pieces else DECODE_TILE)
    # A program's heads go to one place, so their number divides those of queries and of keys.
    side = min(math.gcd(heads, kv_heads, 1 << 10), max(1, tile // power_of_two(head_dim)))
    warps = max(1, min(warps, side * power_of_two(head_dim) // PER_WARP))
    if tokens:
        cosine, sine = (None, None) if rotation is None else (rotation.cosine, rotation.sine)
        rotate_kernel[(tokens, every // side)](
            named(
                projected=projected, projected_stride=projected.stride(0), weight=weight, cosine=cosine, sine=sine,
                queries=queries, heads=heads, kv_heads=kv_heads, cell=cell, eps=eps,
            ),
            cache_of(view), pages_of(batch, view),
            HEAD_DIM=head_dim, HALF=half, HALF_BLOCK=power_of_two(max(half, 1)), REST_BLOCK=power_of_two(max(rest, 1)),
            SIDE=side, num_warps=warps, **early(projected),
        )  # fmt: skip
    return queries


@triton.jit
def normed(value, inverse, scale, turning, dtype: tl.constexpr):
    """Norm queries and keys, rounded between norm and rotation as in the reference; pass values through."""
    return tl.where(turning, (value * inverse * scale.to(tl.float32)).to(dtype).to(tl.float32), value)


@jit(**STEP)
def rotate_kernel(
    projected, projected_stride, weight, cosine, sine, queries, heads, kv_heads, cell, eps,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    SIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Process SIDE heads of a token, all queries, all keys or all values. A head is two halves, rotated together, and a
    rest that is copied."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * SIDE
    turning = first_head < heads + kv_heads
    head = tl.arange(0, SIDE)[:, None]
    page = tl.load(write_page + token).to(tl.int64)
    in_page = (tl.load(positions + token).to(tl.int32) % cell) * kv_heads
    line = page * page_stride + in_page * HEAD_DIM
    source = projected + token * projected_stride + first_head * HEAD_DIM
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    other = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    in_pair, in_rest = (head < SIDE) & (pair < HALF), (head < SIDE) & (other < HEAD_DIM)
    place = head * HEAD_DIM + pair
    rest_place = head * HEAD_DIM + other
    dtype: tl.constexpr = queries.dtype.element_ty
    if HALF:
        angle = token * 2 * HALF + pair
        # Both halves of these hold the same values, but for the sign of the sine.
        along = tl.load(cosine + angle, mask=pair < HALF, other=0.0).to(tl.float32)
        across = tl.load(sine + angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    if weight is not None:
        weight += first_head * HEAD_DIM
        first_scale = tl.load(weight + place, mask=in_pair & turning, other=0.0)
        second_scale = tl.load(weight + place + HALF, mask=in_pair & turning, other=0.0)
        rest_scale = tl.load(weight + rest_place, mask=in_rest & turning, other=0.0)
    wait(EARLY)
    first = tl.load(source + place, mask=in_pair, other=0.0).to(tl.float32)
    second = tl.load(source + place + HALF, mask=in_pair, other=0.0).to(tl.float32)
    rest = tl.load(source + rest_place, mask=in_rest, other=0.0).to(tl.float32)
    if weight is not None:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        first = normed(first, inverse, first_scale, turning, dtype)
        second = normed(second, inverse, second_scale, turning, dtype)
        rest = normed(rest, inverse, rest_scale, turning, dtype)
    if HALF:
        turned = tl.where(turning, first * along - second * across, first)
        second = tl.where(turning, second * along + first * across, second)
        first = turned
    first, second, rest = first.to(dtype), second.to(dtype), rest.to(dtype)
    own_head = first_head - heads - tl.where(turning, 0, kv_heads)
    if key_exponents is not None:
        if first_head < heads:
            to = queries + (token * heads + first_head) * HEAD_DIM
            _store_heads(to, place, rest_place, first, second, rest, in_pair, in_rest, HALF, HEAD_DIM)
        else:
            pages, exponents = key_pages, key_exponents
            if not turning:
                pages, exponents = value_pages, value_exponents
            spot = exponents + page * exponent_stride + in_page + own_head + tl.arange(0, SIDE)
            codes = pages + line + own_head * HEAD_DIM
            _store_codes(codes, spot, place, rest_place, first, second, rest, in_pair, in_rest, HALF, HEAD_DIM)
    else:
        if first_head < heads:
            to = queries + (token * heads + first_head) * HEAD_DIM
        elif turning:
            to = key_pages + line + own_head * HEAD_DIM
        else:
            to = value_pages + line + own_head * HEAD_DIM
        _store_heads(to, place, rest_place, first, second, rest, in_pair, in_rest, HALF, HEAD_DIM)


@triton.jit
def _store_codes(
    to, spot, place, rest_place, first, second, rest, in_pair, in_rest, HALF: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store heads as codes, and at `spot` their exponents, which come from all of their numbers."""
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    sizes = tl.maximum(tl.max(size_of(first), 1), tl.max(size_of(second), 1))
    kind: tl.constexpr = to.dtype.element_ty
    found = exponent_for(tl.maximum(sizes, tl.max(size_of(rest), 1)), kind)
    tl.store(spot, found.to(tl.uint8))
    exponent = found[:, None]
    first, second, rest = coded(first, exponent, kind), coded(second, exponent, kind), coded(rest, exponent, kind)
    _store_heads(to, place, rest_place, first, second, rest, in_pair, in_rest, HALF, HEAD_DIM)


@triton.jit
def _store_heads(
    to, place, rest_place, first, second, rest, in_pair, in_rest, HALF: tl.constexpr, HEAD_DIM: tl.constexpr
):
    if HALF:
        tl.store(to + place, first, mask=in_pair)
        tl.store(to + place + HALF, second, mask=in_pair)
    if 2 * HALF < HEAD_DIM:
        tl.store(to + rest_place, rest, mask=in_rest)
