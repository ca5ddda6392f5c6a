"""Latent attention on a GPU, by absorption: decodes and prompts read latent pages with one kernel.

A line is one head of one token. All heads read the same page, so a program takes a block of lines of one row, whatever
their tokens and heads, and walks over the row's latents. A latent is loaded once and used twice: as key and as value.
If the lines are too few to occupy the GPU, several programs share a block's cells, and a second kernel merges their
parts, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.attention import LatentInputs
from weft.kernels.cuda.attention.decode import multiprocessors_of
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of, pieces_of, rows_of
from weft.kernels.cuda.launch.launching import jit, named, padded, power_of_two
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed

LOG2_E = tl.constexpr(1.4426950408889634)


class LatentLaunch(NamedTuple):
    lines: int
    keys: int  # latents of one cell loaded at once
    warps: int
    stages: int


# By bytes of a number. A block of float32 latents leaves no room for more in shared memory.
LAUNCHES = {2: LatentLaunch(64, 32, 8, 2), 4: LatentLaunch(16, 16, 4, 1)}
# Programs per multiprocessor that are enough without sharing, and the maximum that share a block.
ENOUGH, MOST_SHARES = 2, 32


def attend_latents(
    inputs: LatentInputs, batch: Batch, view: AttentionView, out: Float[Tensor, "tokens inner"] | None = None
) -> Float[Tensor, "tokens inner"]:
    queries, latents, weights, scale = inputs.queries, inputs.latents, inputs.weights, inputs.scale
    write_latents(latents, inputs.shared, batch, view)
    absorbed = weights.absorb(queries)
    mixed = torch.empty(*queries.shape[:2], latents.shape[1], dtype=queries.dtype, device=queries.device)
    if batch.decodes:
        attend_lines(absorbed, mixed, batch, view, scale, of_decodes=True)
    if batch.pieces:
        attend_lines(absorbed, mixed, batch, view, scale, of_decodes=False)
    return placed(weights.expand(mixed).flatten(1), out)


def write_latents(
    latents: Float[Tensor, "tokens latent"],
    shared: Float[Tensor, "tokens shared_dim"],
    batch: Batch,
    view: AttentionView,
) -> None:
    """Write new latents and shared keys to their pages: the token at position p goes to index p % cell of its page."""
    (tokens, latent), shared_dim = latents.shape, shared.shape[1]
    _write_latent[(tokens,)](
        named(latents=latents, latents_stride=latents.stride(0), shared=shared, shared_stride=shared.stride(0)),
        cache_of(view), pages_of(batch, view),
        CELL=view.keys.shape[1], LATENT=latent, SHARED=shared_dim, BLOCK=power_of_two(latent + shared_dim),
        num_warps=2,
    )  # fmt: skip


def attend_lines(
    queries: Float[Tensor, "tokens heads width"],
    mixed: Float[Tensor, "tokens heads latent"],
    batch: Batch,
    view: AttentionView,
    scale: float,
    of_decodes: bool,
    shares: int | None = None,
    launch: LatentLaunch | None = None,
) -> None:
    """Attend for rows of one token or for all others, from absorbed queries into sums of latents."""
    heads, latent = mixed.shape[1:]
    cell, width = view.keys.shape[1], view.keys.shape[3]
    launch = launch or LAUNCHES[queries.element_size()]
    count = heads if of_decodes else heads * cell
    block = min(launch.lines, padded(count))
    blocks = -(-count // block)
    programs = (batch.decodes if of_decodes else batch.pieces) * blocks
    shares = shares or choose_shares(programs, multiprocessors_of(queries.device))
    block_latent = padded(latent)
    # The result of every share's lines, then the logarithms of the sums that it was divided by.
    size = programs * shares * block * (block_latent + 1) if shares > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=queries.device)
    results = named(mixed=mixed, parts=parts, shares=shares)
    step = pages_of(batch, view), rows_of(batch), pieces_of(batch)
    common = {
        "HEADS": heads,
        "LATENT": latent,
        "BLOCK_LATENT": block_latent,
        "BLOCK": block,
        "BLOCKS": blocks,
        "CELL": cell,
        "OF_DECODES": of_decodes,
    }
    _attend_block[(programs, shares)](
        named(q=queries, q_token_stride=queries.stride(0), q_head_stride=queries.stride(1), scale=scale),
        results, cache_of(view), *step,
        SHARED=width - latent, BLOCK_SHARED=padded(width - latent), KEYS=min(launch.keys, cell), SPLIT=shares > 1,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        **common, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if shares > 1:
        _merge_shares[(programs, block)](results, *step, **common, num_warps=1)


def choose_shares(programs: int, multiprocessors: int) -> int:
    """Return how many programs share the cells of a block: enough to occupy the GPU.

    >>> choose_shares(1, 132), choose_shares(64, 132), choose_shares(1000, 132)
    (32, 4, 1)
    """
    return max(1, min(MOST_SHARES, ENOUGH * multiprocessors // programs))


@jit(**STEP)
def _write_latent(
    latents, latents_stride, shared, shared_stride,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    CELL: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    page = tl.load(write_page + token).to(tl.int64)
    index = tl.load(positions + token) % CELL
    feature = tl.arange(0, BLOCK)
    is_latent = feature < LATENT
    own = tl.load(latents + token.to(tl.int64) * latents_stride + feature, mask=is_latent, other=0.0)
    is_shared = (feature >= LATENT) & (feature < LATENT + SHARED)
    common = tl.load(shared + token.to(tl.int64) * shared_stride + feature - LATENT, mask=is_shared, other=0.0)
    at = key_pages + page * page_stride + index * (LATENT + SHARED) + feature
    tl.store(at, tl.where(is_latent, own, common), mask=feature < LATENT + SHARED)


@triton.jit
def _lines_of(
    number, row_start, row_first, piece_row, piece_position,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CELL: tl.constexpr, OF_DECODES: tl.constexpr,
):  # fmt: skip
    """Return the row of a block, the positions, tokens and heads of its lines, and the end of the row's positions.

    A line whose position is not before the end does not exist.
    """
    unit = number // BLOCKS
    row = unit if OF_DECODES else tl.load(piece_row + unit)
    start, first = tl.load(row_start + row), tl.load(row_first + row)
    low = start
    end = start + tl.load(row_first + row + 1) - first
    if not OF_DECODES:
        cell_start = tl.load(piece_position + unit)
        low = tl.maximum(start, cell_start)
        end = tl.minimum(end, cell_start + CELL)
    line = number % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    position = low + line // HEADS
    return row, position, (first + position - start).to(tl.int64), line % HEADS, end


@jit(**STEP)
def _attend_block(
    q, q_token_stride, q_head_stride, scale, mixed, parts, shares,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_LATENT: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CELL: tl.constexpr, KEYS: tl.constexpr,
    OF_DECODES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for one block of lines over its share of the latents that they see."""
    number, share = tl.program_id(0), tl.program_id(1)
    row, position, token, head, end = _lines_of(
        number, row_start, row_first, piece_row, piece_position, HEADS, BLOCK, BLOCKS, CELL, OF_DECODES
    )
    highest = tl.minimum(tl.max(position, 0), end - 1)
    if tl.min(position, 0) >= end:
        return
    latent, common = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_SHARED)
    is_line = (position < end)[:, None]
    query_at = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride
    query = tl.load(query_at + latent[None, :], mask=is_line & (latent < LATENT)[None, :], other=0.0)
    query_shared = tl.load(query_at + LATENT + common[None, :], mask=is_line & (common < SHARED)[None, :], other=0.0)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    found = tl.zeros([BLOCK, BLOCK_LATENT], tl.float32)

    begin, stop = 0, highest // KEYS + 1
    if SPLIT:
        size = tl.cdiv(stop, shares)
        begin = share * size
        stop = tl.minimum(stop, begin + size)
    index = tl.arange(0, KEYS)
    row_pages = page_list + tl.load(page_bounds + row)
    for block in tl.range(begin, stop):
        page = tl.load(row_pages + block * KEYS // CELL).to(tl.int64)
        key_position = block * KEYS + index
        # Memory that is not seen may hold NaN, so it is not even loaded.
        seen = (key_position <= highest)[:, None]
        at = key_pages + page * page_stride + (key_position % CELL)[:, None] * (LATENT + SHARED)
        latents = tl.load(at + latent[None, :], mask=seen & (latent < LATENT)[None, :], other=0.0)
        keys = tl.load(at + LATENT + common[None, :], mask=seen & (common < SHARED)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(query_shared, tl.trans(keys), acc=scores, input_precision=PRECISION)
        visible = key_position[None, :] <= tl.minimum(position, highest)[:, None]
        scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A line that has seen nothing yet: any finite number works.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, fading = tl.exp2(scores - reference[:, None]), tl.exp2(peak - reference)
        total = total * fading + tl.sum(weights, 1)
        found = tl.dot(weights.to(latents.dtype), latents, acc=found * fading[:, None], input_precision=PRECISION)
        peak = new_peak

    # A line may see nothing of a share.
    found *= tl.where(total > 0, 1 / total, 0.0)[:, None]
    if SPLIT:
        at = (number.to(tl.int64) * shares + share) * BLOCK + tl.arange(0, BLOCK)
        tl.store(parts + at[:, None] * BLOCK_LATENT + latent[None, :], found)
        sums = parts + tl.num_programs(0).to(tl.int64) * shares * (BLOCK * BLOCK_LATENT)
        tl.store(sums + at, peak + tl.log2(total))
    else:
        at = mixed + (token * HEADS + head)[:, None] * LATENT + latent[None, :]
        tl.store(at, found.to(mixed.dtype.element_ty), mask=is_line & (latent < LATENT)[None, :])


@jit(**STEP)
def _merge_shares(
    mixed, parts, shares,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    piece_row, piece_position, piece_slot, first_piece, decodes, pieces,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, CELL: tl.constexpr, OF_DECODES: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one line, each weighted by the sum that it was divided by."""
    number, line = tl.program_id(0), tl.program_id(1)
    _, positions_of_lines, tokens, heads, end = _lines_of(
        number, row_start, row_first, piece_row, piece_position, HEADS, BLOCK, BLOCKS, CELL, OF_DECODES
    )
    is_mine = tl.arange(0, BLOCK) == line
    if tl.sum(tl.where(is_mine, positions_of_lines, 0), 0) >= end:
        return
    latent = tl.arange(0, BLOCK_LATENT)
    sums = parts + tl.num_programs(0).to(tl.int64) * shares * (BLOCK * BLOCK_LATENT)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    found = tl.zeros([BLOCK_LATENT], tl.float32)
    for share in range(shares):
        at = (number.to(tl.int64) * shares + share) * BLOCK + line
        own = tl.load(sums + at)
        part = tl.load(parts + at * BLOCK_LATENT + latent)
        new_peak = tl.maximum(peak, own)
        # The first share has a latent that every line sees, so the maximum is finite.
        weight, fading = tl.exp2(own - new_peak), tl.exp2(peak - new_peak)
        found = found * fading + part * weight
        total = total * fading + weight
        peak = new_peak
    at = tl.sum(tl.where(is_mine, tokens * HEADS + heads, 0), 0)
    tl.store(mixed + at * LATENT + latent, (found / total).to(mixed.dtype.element_ty), mask=latent < LATENT)
