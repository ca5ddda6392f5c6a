"""Paged attention on a GPU: choice of the kernel for each kind of row.

Keys and values go to their pages (`write_pages`), then everything is read back (`read_pages`): rows of one token by
`attention_decode`, all others by FlashInfer where it is warmed and faster, by `attention_prefill` otherwise.

The measurements behind this choice, on an H200, bfloat16, 32 query and 8 key heads of 128, in microseconds per layer.
The two columns are from two runs of one day; all include about 8 for launching a graph. Floor: bytes at the bandwidth
of a copy, or operations at the rate of matmuls, whichever takes longer.

                                     floor   Triton   FlashInfer
    64 rows of one token x 4,096       251      262          259
    64 x 200 .. 8,000                  242      254          292
    128 x 512                           63       86           85
    1 x 32,768                          31       50           51
    a prompt of 8,192                  671    1,343          985 (fa3), 1,699 (fa2)
    4 x 2,048 tokens after 2,048       503    1,044          750 (fa3), 1,234 (fa2)
    64 x 17 .. 130 after 1,000          98      291          308 (fa3),   316 (fa2)

Decodes that begin with the same pages read those together (`attention_shared`).
Decodes gain nothing from FlashInfer, and Triton's need no plan on the host; a plan takes about a millisecond there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.base.grid import CELL
from weft.device.store import AttentionView
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.cuda.activation import gated_product
from weft.kernels.cuda.attention import flashinfer
from weft.kernels.cuda.attention.decode import attend_decodes, attend_drafts, attends_drafts
from weft.kernels.cuda.attention.flashinfer import WrapperShape
from weft.kernels.cuda.attention.prefill import attend_pieces
from weft.kernels.cuda.attention.shared import attend_shared, prefix_members
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.rotary import rotate_and_write
from weft.kernels.interface import Batch

__all__ = ["attend", "prefix_members", "warm_attention"]

log = logging.getLogger(__name__)

Backend = Literal["fa3", "fa2", "triton"]
# New tokens times tokens seen, of the longest row, from which FlashInfer's speed outweighs its plan on the host.
FLASHINFER_WORK = 1 << 20


def attend(
    inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    """Norm, rotate and write the pages in one kernel; read them in others; gate last."""
    form = inputs.form
    heads = inputs.projected.unflatten(-1, (-1, form.head_dim))
    queries = rotate_and_write(heads, form.heads, inputs.norm, form.norm_eps, inputs.rotation, batch, view)
    by_head = None if out is None or form.gated else out.unflatten(-1, (-1, form.head_dim))
    mixed = read_pages(queries, batch, view, form.scale, form.softcap, inputs.sinks, by_head).flatten(-2)
    if not form.gated:
        return mixed
    gate = heads[:, form.heads + 2 * form.kv_heads :].flatten(-2)
    return gated_product(gate, mixed, torch.sigmoid, out)


def attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Attend with queries and keys that are already normed and rotated."""
    write_pages(k, v, batch, view)
    return read_pages(q, batch, view, scale, softcap, sinks)


def read_pages(
    q: Float[Tensor, "tokens heads head_dim"],
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Attend after this step's keys and values are in their pages. Features of a head must be contiguous.

    `out`, if given, is filled and returned; its tokens need not be adjacent.
    """
    listed = batch.pages(view.window)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.stride()[1:] == (q.shape[2], 1)
    if batch.decodes:
        reads_groups = batch.shared is not None and view.window is None
        read = attend_shared if reads_groups else attend_decodes
        read(q, out, batch, view, scale, softcap, sinks)
    if batch.pieces and attends_drafts(q, batch, view):
        attend_drafts(q, out, batch, view, scale, softcap, sinks)
    elif batch.pieces:
        shape = shape_of(q, view, scale, softcap)
        seen = batch.farthest if view.window is None else min(batch.farthest, view.window + batch.longest)
        is_read_by_others = view.key_exponents is None and batch.longest * seen >= FLASHINFER_WORK
        if is_read_by_others and flashinfer.is_warm(shape, q.device):
            flashinfer.attend_prefill(q, out, batch, listed, view, shape, sinks, batch.derived)
        else:
            attend_pieces(q, out, batch, view, scale, softcap, sinks)
    return out


def shape_of(q: Tensor, view: AttentionView, scale: float, softcap: float | None) -> WrapperShape:
    _, cell, kv_heads, head_dim = view.keys.shape
    return WrapperShape(q.dtype, q.shape[1], kv_heads, head_dim, cell, scale, view.window, softcap)


def warm_attention(forms: Sequence[AttentionForm], dtype: torch.dtype) -> None:
    warm([WrapperShape(dtype, f.heads, f.kv_heads, f.head_dim, CELL, f.scale, f.window, f.softcap) for f in forms])


def warm(shapes: Iterable[WrapperShape], device: torch.device | str = "cuda") -> None:
    """Prepare FlashInfer for these layers, or log once what is slower without it. Call this at start."""
    device = torch.device(device)
    wanted: dict[Backend, list[WrapperShape]] = {}
    for shape in shapes:
        chosen = choose_backend(shape, torch.cuda.get_device_capability(device), flashinfer.is_installed())
        wanted.setdefault(chosen, []).append(shape)
    if "triton" in wanted and not flashinfer.is_installed():
        _say_it_is_missing()
    for backend, chosen_shapes in wanted.items():
        if backend != "triton":
            flashinfer.warm(chosen_shapes, backend, device)


@cache
def _say_it_is_missing() -> None:
    log.warning("FlashInfer is not installed: attention over prompts uses Triton, which is slower")


def choose_backend(shape: WrapperShape, capability: tuple[int, int], is_installed: bool) -> Backend:
    """Return the backend that reads pages for rows of several tokens.

    >>> layer = WrapperShape(torch.bfloat16, 32, 8, 128, 64, 0.1, None, None)
    >>> choose_backend(layer, (9, 0), True), choose_backend(layer, (8, 0), True), choose_backend(layer, (9, 0), False)
    ('fa3', 'fa2', 'triton')
    """
    # FlashInfer multiplies in half precision only, and is compiled for these head sizes.
    if not is_installed or shape.dtype not in (torch.bfloat16, torch.float16) or shape.head_dim not in (64, 128, 256):
        return "triton"
    if capability[0] < 8:
        return "triton"
    return "fa3" if capability == (9, 0) else "fa2"


def write_pages(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    batch: Batch,
    view: AttentionView,
) -> None:
    """Write new keys and values to their pages: the token at position p goes to index p % cell of its page."""
    tokens, kv_heads, head_dim = k.shape
    cell = view.keys.shape[1]
    assert view.key_exponents is None, "layers write pages when they rotate"
    _write_token[(tokens,)](
        named(
            k_ptr=k, k_token_stride=k.stride(0), k_head_stride=k.stride(1),
            v_ptr=v, v_token_stride=v.stride(0), v_head_stride=v.stride(1),
        ),
        cache_of(view), pages_of(batch, view),
        CELL=cell, HEAD_DIM=head_dim, SIZE=kv_heads * head_dim, BLOCK=power_of_two(kv_heads * head_dim),
        num_warps=2, **early(k),
    )  # fmt: skip


@jit(**STEP)
def _write_token(
    k_ptr, k_token_stride, k_head_stride, v_ptr, v_token_stride, v_head_stride,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    CELL: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    page = tl.load(write_page + token).to(tl.int64)
    index = tl.load(positions + token) % CELL
    item = tl.arange(0, BLOCK)
    head, feature = item // HEAD_DIM, item % HEAD_DIM
    wait(EARLY)
    k = tl.load(k_ptr + token.to(tl.int64) * k_token_stride + head * k_head_stride + feature, mask=item < SIZE)
    v = tl.load(v_ptr + token.to(tl.int64) * v_token_stride + head * v_head_stride + feature, mask=item < SIZE)
    at = page * page_stride + index * SIZE + item
    tl.store(key_pages + at, k, mask=item < SIZE)
    tl.store(value_pages + at, v, mask=item < SIZE)
