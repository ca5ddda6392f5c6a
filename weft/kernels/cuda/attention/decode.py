"""Paged attention for rows of one token, or of a few such as drafts, in Triton: the cells of all rows, in equal shares.

The list of pages is one line of cells, row after row. A fixed number of programs per head divides it evenly,
regardless of row boundaries, so all finish together whether the rows are many, few, long or of very different
lengths. Each program finds its cells on the device, so a CUDA graph can be replayed with other rows. All tokens of a
row and all heads of a group read a cell together. A row that lies within one share is finished there; a second kernel
merges the parts of the others, always in the same order. Neither writes pages.

Both kernels also compute the two passes over shared prefixes (`attention_shared`), with a `Prefix`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.device.store import AttentionView
from weft.kernels.cuda.attention.pages import halves_of, in_float16, numbers_of, powers_in_words, rise_of
from weft.kernels.cuda.launch.arguments import STEP, cache_of, pages_of, records_drafts, rows_of
from weft.kernels.cuda.launch.gpus import INTERPRETED, gpu_of
from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.interface import Batch, PageSections

LOG2_E = tl.constexpr(1.4426950408889634)


class DecodeLaunch(NamedTuple):
    keys: int  # keys of one cell loaded at once
    warps: int
    stages: int


# By bytes of a head's key, padded to a power of two.
LAUNCHES = {128: DecodeLaunch(64, 4, 3), 256: DecodeLaunch(64, 4, 3), 512: DecodeLaunch(32, 4, 3)}
# Of codes, by the same bytes, and programs of a multiprocessor: eight warps may use all of its registers. Instructions
# are the limit, and two warps that share a tile wait for each other less than four do.
CODE_LAUNCHES = {
    64: (DecodeLaunch(64, 2, 3), 4),
    128: (DecodeLaunch(64, 2, 3), 4),
    256: (DecodeLaunch(32, 2, 3), 4),
    512: (DecodeLaunch(32, 4, 3), 2),
}
# All other cases: float32 heads too large for several stages in shared memory, and tests' small ones.
PLAIN_LAUNCH = DecodeLaunch(64, 4, 1)
# Programs that fit on one multiprocessor.
AT_ONCE = 3
# For rows of a few tokens, where they differ. More lines leave less room: two programs per multiprocessor take turns.
DRAFT_LAUNCHES = LAUNCHES | {512: DecodeLaunch(64, 4, 2)}
DRAFTS_AT_ONCE = 2
# Sums that a warp holds in registers, in values of heads. Of more, the warps are up to eight.
MOST_SUMS = 8 * 256
# Maximum tokens of a row that are read together, and of tokens times heads of a group: beyond, registers run out. Then
# bytes of their queries: beyond, shared memory does (float32 heads of 512).
MOST_TOKENS, MOST_LINES, MOST_QUERIES = 8, 64, 64 << 10


class DecodeSharing(NamedTuple):
    """Maximum number of shares of the line of cells, and minimum number of cells per share."""

    shares: int
    least_cells: int


def share_out(multiprocessors: int, kv_heads: int, at_once: int = AT_ONCE) -> DecodeSharing:
    """Return as many shares as can be read concurrently.

    >>> share_out(multiprocessors=132, kv_heads=8)
    DecodeSharing(shares=49, least_cells=1)
    """
    return DecodeSharing(max(1, multiprocessors * at_once // kv_heads), 1)


def multiprocessors_of(device: torch.device) -> int:
    """Return how many programs run concurrently; the interpreter reports a few."""
    gpu = gpu_of(device)
    return 3 if gpu is INTERPRETED else gpu.multiprocessors


def attend_decodes(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sharing: DecodeSharing | None = None,
    launch: DecodeLaunch | None = None,
) -> None:
    """Attend for the leading `batch.decodes` tokens of `q` [tokens, heads, head_dim] into those of `out`."""
    attend_rows(q, out, batch, view, scale, softcap, sinks, batch.decodes, 1, sharing, launch)


class Prefix(NamedTuple):
    """One of two passes over decodes with shared prefixes, and what the first one leaves for the second."""

    sections: PageSections  # read by this pass
    mixed: Tensor  # [tokens, heads, head_dim] divided by the sum of weights
    sums: Tensor  # [tokens * heads] logarithms of those sums, to base 2
    order: Tensor | None  # tokens of the groups' members; None in the second pass


def attends_drafts(q: Tensor, batch: Batch, view: AttentionView) -> bool:
    """Return whether `attend_drafts` is for this step: recorded for rows of a few tokens, and nothing else."""
    lines = power_of_two(batch.longest * (q.shape[1] // view.keys.shape[2]))
    fits = lines <= MOST_LINES and lines * power_of_two(q.shape[2]) * q.element_size() <= MOST_QUERIES
    return batch.decodes == 0 and records_drafts(batch, MOST_TOKENS) and fits


def attend_drafts(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sharing: DecodeSharing | None = None,
    launch: DecodeLaunch | None = None,
) -> None:
    """Attend for all rows, of at most `batch.longest` tokens. Only padding is longer: what is left of it is zeros."""
    attend_rows(q, out, batch, view, scale, softcap, sinks, batch.rows, batch.longest, sharing, launch)


def attend_rows(
    q: Tensor,
    out: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    rows: int,
    tokens: int,
    sharing: DecodeSharing | None,
    launch: DecodeLaunch | None,
    prefix: Prefix | None = None,
) -> None:
    """Attend for the leading `rows` rows of at most `tokens` tokens each, or in one of two passes with a `prefix`."""
    heads, head_dim = q.shape[1:]
    _, cell, kv_heads, _ = view.keys.shape
    block_dim = max(16, power_of_two(head_dim))
    lines, key_bytes = max(16, power_of_two(tokens * (heads // kv_heads))), block_dim * view.keys.element_size()
    chosen, at_once = launch_of(view, key_bytes, tokens, lines * block_dim)
    sharing = sharing or share_out(multiprocessors_of(q.device), kv_heads, at_once)
    launch = launch or chosen
    # For every share: the part of a row that starts before it, and the part of a row that ends after it; then their
    # sums.
    parts = torch.empty(sharing.shares * 2 * tokens * heads * (head_dim + 1), dtype=torch.float32, device=q.device)
    found = named(
        out_ptr=out, out_token_stride=out.stride(0), parts_ptr=parts, sinks_ptr=out if sinks is None else sinks,
        rows=rows, shares=sharing.shares, least_cells=sharing.least_cells, **sections_of(prefix, batch, out),
    )  # fmt: skip
    common = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "TOKENS": tokens,
        "HAS_SINKS": sinks is not None,
        "GROUPED": prefix is not None and prefix.order is not None,
        "CONTINUED": prefix is not None and prefix.order is None,
        **early(q),
    }
    _attend_share[(kv_heads, sharing.shares)](
        named(q_ptr=q, q_token_stride=q.stride(0), q_head_stride=q.stride(1), scale=scale), found,
        cache_of(view), pages_of(batch, view), rows_of(batch),
        LINES=lines, CELL=cell, KEYS=min(launch.keys, cell), WORDS=has_words(view, block_dim),
        WINDOW=view.window or 0, SOFTCAP=softcap or 0.0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **common, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    # Every border of two shares cuts at most one row.
    borders = sharing.shares - 1
    if not borders:
        return
    by_border = rows * tokens > borders
    at_once = power_of_two(tokens) if by_border else 1
    _merge_parts[(heads, borders if by_border else rows * tokens)](
        found, pages_of(batch, view), rows_of(batch),
        **common, BORDERS=by_border, AT_ONCE=at_once, num_warps=(1 if block_dim < 256 else 2) * min(2, at_once),
    )  # fmt: skip


def launch_of(view: AttentionView, key_bytes: int, tokens: int, sums: int) -> tuple[DecodeLaunch, int]:
    """Return a launch, and the programs of a multiprocessor."""
    if view.key_exponents is not None:
        chosen, at_once = CODE_LAUNCHES.get(key_bytes, (PLAIN_LAUNCH, AT_ONCE))
    elif tokens == 1:
        chosen, at_once = LAUNCHES.get(key_bytes, PLAIN_LAUNCH), AT_ONCE
    else:
        chosen, at_once = DRAFT_LAUNCHES.get(key_bytes, PLAIN_LAUNCH), DRAFTS_AT_ONCE
    warps = max(chosen.warps, min(8, sums // MOST_SUMS))
    if view.key_exponents is not None:
        at_once = max(1, at_once * chosen.warps // warps)
    return chosen._replace(warps=warps), at_once


def has_words(view: AttentionView, block_dim: int) -> bool:
    """Return whether pages hold codes that can be read two by two."""
    return view.key_exponents is not None and view.keys.shape[3] % 2 == 0 and block_dim >= 32


def sections_of(prefix: Prefix | None, batch: Batch, unused: Tensor) -> dict[str, Tensor]:
    """Return a kernel's arguments for shared prefixes; without any they are not read."""
    if prefix is None:
        return {"page_place": batch.start, "member_token": batch.start, "prefix_ptr": unused, "prefix_sums_ptr": unused}
    return {
        "page_place": prefix.sections.place,
        "member_token": batch.start if prefix.order is None else prefix.order,
        "prefix_ptr": prefix.mixed,
        "prefix_sums_ptr": prefix.sums,
    }


@triton.jit
def _size_of_shares(page_bounds, rows, shares, least_cells):
    return tl.maximum(tl.cdiv(tl.load(page_bounds + rows), shares), least_cells)


@triton.jit
def _row_of(cell, page_bounds, rows):
    """Return the row of a cell of the line: the number of rows that end at it or before."""
    BLOCK: tl.constexpr = 256
    row = 0
    for first in range(0, rows, BLOCK):
        number = first + tl.arange(0, BLOCK)
        ends = tl.load(page_bounds + 1 + number, mask=number < rows, other=2147483647)
        row += tl.sum((ends <= cell).to(tl.int32), 0)
    return row


@triton.jit
def _tokens_of(row, row_first, TOKENS: tl.constexpr):
    """Return a row's first token in the pack, and how many it has. Decodes lead the pack, one token each."""
    if TOKENS == 1:
        return row, 1
    first = tl.load(row_first + row)
    return first, tl.load(row_first + row + 1) - first


@triton.jit
def _packed(index, is_known, member_token, GROUPED: tl.constexpr):
    """Return the tokens of these indices, in 64 bits; of members of groups, find them."""
    if GROUPED:
        index = tl.load(member_token + index, mask=is_known, other=0)
    return tl.cast(index, tl.int64)


@triton.jit
def _row_at(row, row_start, row_first, page_first, page_bounds, page_place, TOKENS: tl.constexpr, APART: tl.constexpr):
    """Return the end of a row's cells, its start, the first position of its pages, their place if it is apart from the
    line's, and its tokens."""
    first, length = _tokens_of(row, row_first, TOKENS)
    place = tl.load(page_place + row) if APART else 0
    return tl.load(page_bounds + row + 1), tl.load(row_start + row), tl.load(page_first + row), place, first, length


@triton.jit
def _beginning(
    result, goes_on, prefix_ptr, prefix_sums_ptr,
    LINES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CONTINUED: tl.constexpr,
):  # fmt: skip
    """Return the running softmax of lines that have read nothing yet, or go on from the result of a shared prefix."""
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, BLOCK_DIM], tl.float32)
    if CONTINUED:
        feature = tl.arange(0, BLOCK_DIM)
        peak = tl.load(prefix_sums_ptr + result, mask=goes_on, other=float("-inf"))
        total = tl.where(goes_on, 1.0, 0.0)
        mixed_at = prefix_ptr + result[:, None] * HEAD_DIM + feature[None, :]
        mixed = tl.load(mixed_at, mask=goes_on[:, None] & (feature < HEAD_DIM)[None, :], other=0.0)
    return peak, total, mixed


@triton.jit
def _fill(
    out_ptr, first, known, token, out_token_stride, head,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Fill the outputs of a row's tokens after the first TOKENS with zeros. Line i is of token `token[i]`."""
    feature = tl.arange(0, BLOCK_DIM)
    for later in range(TOKENS, known, TOKENS):
        place = (tl.cast(first, tl.int64) + later + token)[:, None] * out_token_stride + head[:, None] * HEAD_DIM
        real = (later + token < known)[:, None] & (token < TOKENS)[:, None] & (feature < HEAD_DIM)[None, :]
        nothing = tl.zeros([head.shape[0], BLOCK_DIM], out_ptr.dtype.element_ty)
        tl.store(out_ptr + place + feature[None, :], nothing, mask=real)


@triton.jit
def _store_part(parts_ptr, which, sums_at, peak, total, mixed, feature, is_line, is_query, HEAD_DIM: tl.constexpr):
    """Store what a share has found of a row that others read too."""
    # Cells that no query sees any more leave nothing to divide.
    inverse = tl.where(total > 0, 1 / total, 0.0)
    part_at = which[:, None] * HEAD_DIM + feature[None, :]
    tl.store(parts_ptr + part_at, mixed * inverse[:, None], mask=is_query)
    tl.store(parts_ptr + sums_at, peak + tl.log2(total), mask=is_line)


@triton.jit
def _store_whole(
    out_ptr, out_at, sinks_ptr, prefix_sums_ptr, at, head, peak, total, mixed, is_line, is_query,
    HAS_SINKS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a row that lies within one share; of a group its sums too."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_line, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2_E - peak)
    tl.store(out_ptr + out_at, (mixed * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)
    if GROUPED:
        tl.store(prefix_sums_ptr + at, peak + tl.log2(total), mask=is_line)


@triton.jit
def _queries_of_words(q, scale, HALVES: tl.constexpr, LINES: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return even and odd features of queries as codes are multiplied with them, and the scale of their scores."""
    if HALVES:
        q, unit = in_float16(q)
        scale = (scale * unit)[:, None]
    even, odd = halves_of(q, LINES, BLOCK_DIM)
    return even, odd, scale


@triton.jit
def _scores(
    q, odd_q, keys, exponents, powers, there, scale,
    WORDS: tl.constexpr, KIND: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of keys. `odd_q`: odd features of queries, where keys are WORDS of two codes."""
    if exponents is not None:
        factor = powers_in_words(exponents, powers, there)
    if WORDS:
        even_keys, odd_keys = numbers_of(keys, q.dtype, KIND)
        found = tl.dot(q, tl.trans(even_keys), input_precision=PRECISION)
        found = tl.dot(odd_q, tl.trans(odd_keys), acc=found, input_precision=PRECISION) * scale
    else:
        found = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision=PRECISION) * scale
    if exponents is not None:
        found *= factor[None, :]
    if SOFTCAP > 0:
        found = SOFTCAP * (2 * tl.sigmoid(2 * found / SOFTCAP) - 1)
    return found


@triton.jit
def _weights(
    scores, exponents, powers, there, peak, total,
    HALVES: tl.constexpr, TOKENS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Advance the running softmax; return weights times the powers of values, what those before are multiplied with,
    the peak and the sum."""
    highest = scores
    if exponents is not None:
        factor = powers_in_words(exponents, powers, there)
        if HALVES:
            # Products with powers must not be too large for float16, so those have their peak at 1.
            highest = scores + rise_of(factor)[None, :]
    new_peak = tl.maximum(peak, tl.max(highest, 1))
    # One token sees a key of every block. Of several, one may see nothing yet: any finite number works.
    reference = new_peak if TOKENS == 1 or GROUPED else tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - reference[:, None])
    fading = tl.exp2(peak - reference)
    total = total * fading + tl.sum(weights, 1)
    if exponents is not None:
        weights *= factor[None, :]
    return weights, fading, new_peak, total


@triton.jit
def _seen(there, key_position, position, TOKENS: tl.constexpr, GROUPED: tl.constexpr, WINDOW: tl.constexpr):
    """Return which keys that are there each line sees."""
    seen = there[None, :]
    if TOKENS > 1 and not GROUPED:
        seen = seen & (key_position[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def _units(
    key_pages, value_pages, index, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return where pages begin, where keys are in a page, and which features exist. A unit is what is read at once: a
    number, or a word of two codes."""
    unit = tl.arange(0, BLOCK_DIM // UNIT)
    in_page = (index[:, None] * KV_HEADS + kv_head) * (HEAD_DIM // UNIT) + unit[None, :]
    if UNIT == 2:
        key_words = key_pages.to(tl.pointer_type(tl.int16), bitcast=True)
        value_words = value_pages.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        key_words, value_words = key_pages, value_pages
    return key_words, value_words, in_page, (unit < HEAD_DIM // UNIT)[None, :]


@jit(**STEP)
def _attend_share(
    q_ptr, q_token_stride, q_head_stride, scale,
    out_ptr, out_token_stride, parts_ptr, sinks_ptr, rows, shares, least_cells,
    page_place, member_token, prefix_ptr, prefix_sums_ptr,
    key_pages, value_pages, page_stride, key_exponents, value_exponents, exponent_stride,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, LINES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    CELL: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, GROUPED: tl.constexpr, CONTINUED: tl.constexpr,
    WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one share of the line, for the heads of one group, row by row: line i is token i // GROUP.

    GROUPED: a row is a group, its tokens are members, each of which sees all cells; their sums are stored, too.
    CONTINUED: rows whose pages do not begin at position 0 go on from such a result.
    WORDS: codes are read two by two, and even features are computed apart from odd ones; with HALVES in float16.
    """
    kv_head, share = tl.program_id(0), tl.program_id(1)
    size = _size_of_shares(page_bounds, rows, shares, least_cells)
    share_begin = share * size
    share_end = tl.minimum(share_begin + size, tl.load(page_bounds + rows))
    first_row, last_row = _row_of(share_begin, page_bounds, rows), _row_of(share_end - 1, page_bounds, rows)
    wait(EARLY)
    if share_begin >= share_end:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = CELL // KEYS
    APART: tl.constexpr = GROUPED or CONTINUED
    line, feature, index = tl.arange(0, LINES), tl.arange(0, BLOCK_DIM), tl.arange(0, KEYS)
    token, head = line // GROUP, kv_head * GROUP + line % GROUP
    is_feature = feature < HEAD_DIM
    UNIT: tl.constexpr = 2 if WORDS else 1
    HALVES: tl.constexpr = WORDS and q_ptr.dtype.element_ty != tl.float32
    KIND: tl.constexpr = key_pages.dtype.element_ty
    key_units, value_units, in_page, is_unit = _units(
        key_pages, value_pages, index, kv_head, KV_HEADS, HEAD_DIM, BLOCK_DIM, UNIT
    )
    row_begin = tl.load(page_bounds + first_row)
    row_end, start, first_position, place, first, known = _row_at(
        first_row, row_start, row_first, page_first, page_bounds, page_place, TOKENS, APART
    )
    page = tl.load(page_list + (place - row_begin if APART else 0) + share_begin)
    for row in range(first_row, last_row + 1):
        # Load what the next row needs while this one is computed.
        following = _row_at(
            tl.minimum(row + 1, last_row), row_start, row_first, page_first, page_bounds, page_place, TOKENS, APART
        )
        if TOKENS > 1 and not GROUPED:
            # Padding has finite outputs. Only the share in which the row begins writes them.
            last = tl.where(share_begin <= row_begin, known, 0)
            _fill(out_ptr, first, last, token, out_token_stride, head, TOKENS, HEAD_DIM, BLOCK_DIM)
        length = tl.minimum(known, TOKENS)
        position, last = start + token, start if GROUPED else start + length - 1
        low = tl.maximum(first_position, start - WINDOW + 1) if WINDOW else first_position
        is_line, is_query = token < length, (token < length)[:, None] & is_feature[None, :]
        packed = _packed(first + token, is_line, member_token, GROUPED)
        query_at = packed[:, None] * q_token_stride + head[:, None] * q_head_stride + feature[None, :]
        q = tl.load(q_ptr + query_at, mask=is_query, other=0.0)
        # Convert cells of the line to positions of the row, and back; then positions to places in the list of pages.
        origin = row_begin - first_position // CELL
        pages = page_list + (place - first_position // CELL if APART else origin)
        begin, end = tl.maximum(share_begin, row_begin), tl.minimum(share_end, row_end)
        first_block = tl.maximum((begin - origin) * BLOCKS, low // KEYS)
        last_block = tl.minimum((end - origin) * BLOCKS - 1, last // KEYS)
        goes_on = is_line & (begin == row_begin) & (first_position > 0)
        peak, total, mixed = _beginning(
            packed * HEADS + head, goes_on, prefix_ptr, prefix_sums_ptr, LINES, HEAD_DIM, BLOCK_DIM, CONTINUED
        )
        odd_q, query_scale = q, scale
        if WORDS:
            q, odd_q, query_scale = _queries_of_words(q, scale, HALVES, LINES, BLOCK_DIM)
            even, odd = halves_of(mixed, LINES, BLOCK_DIM)
        # A page's number is loaded one block ahead, so that only keys and values are left for the stages.
        if WINDOW:
            next_page = tl.load(pages + tl.minimum(first_block, last_block) // BLOCKS)
        else:
            after = following[3] if APART else tl.minimum(row_end, share_end - 1)
            next_page, page = page, tl.load(page_list + after)
        for block in tl.range(first_block, last_block + 1):
            block_at = next_page.to(tl.int64) * (page_stride // UNIT)
            block_at += block % BLOCKS * (KEYS * KV_HEADS * HEAD_DIM // UNIT)
            powers = next_page.to(tl.int64) * exponent_stride + (block % BLOCKS * KEYS + index) * KV_HEADS + kv_head
            next_page = tl.load(pages + tl.minimum(block + 1, last_block) // BLOCKS)
            key_position = block * KEYS + index
            there = key_position <= last
            if WINDOW:
                there &= key_position >= low
            # Memory that no token sees may hold NaN, so it is not even loaded.
            loaded = there[:, None] & is_unit
            keys = tl.load(key_units + block_at + in_page, mask=loaded, other=0.0)
            scores = _scores(q, odd_q, keys, key_exponents, powers, there, query_scale, WORDS, KIND, SOFTCAP, PRECISION)
            seen = _seen(there, key_position, position, TOKENS, GROUPED, WINDOW)
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))
            weights, fading, peak, total = _weights(
                scores, value_exponents, powers, there, peak, total, HALVES, TOKENS, GROUPED
            )
            values, weights = tl.load(value_units + block_at + in_page, mask=loaded, other=0.0), weights.to(q.dtype)
            if WORDS:
                even_values, odd_values = numbers_of(values, q.dtype, KIND)
                even = tl.dot(weights, even_values, acc=even * fading[:, None], input_precision=PRECISION)
                odd = tl.dot(weights, odd_values, acc=odd * fading[:, None], input_precision=PRECISION)
            else:
                mixed = tl.dot(weights, values.to(q.dtype), acc=mixed * fading[:, None], input_precision=PRECISION)
        if WORDS:
            mixed = tl.reshape(tl.join(even, odd), (LINES, BLOCK_DIM))

        out_at = packed[:, None] * out_token_stride + head[:, None] * HEAD_DIM + feature[None, :]
        if (begin == row_begin) & (end == row_end):
            _store_whole(
                out_ptr, out_at, sinks_ptr, prefix_sums_ptr, packed * HEADS + head, head, peak, total, mixed, is_line,
                is_query, HAS_SINKS, GROUPED,
            )  # fmt: skip
        else:
            which = ((kv_head * shares + share) * 2 + (begin == row_begin).to(tl.int32)) * (TOKENS * GROUP) + line
            sums_at = shares * (2 * TOKENS * HEADS * HEAD_DIM) + which
            _store_part(parts_ptr, which, sums_at, peak, total, mixed, feature, is_line, is_query, HEAD_DIM)
        row_begin = row_end
        row_end, start, first_position, place, first, known = following


@jit(**STEP)
def _merge_parts(
    out_ptr, out_token_stride, parts_ptr, sinks_ptr, rows, shares, least_cells,
    page_place, member_token, prefix_ptr, prefix_sums_ptr,
    positions, write_page, page_first, page_bounds, page_list,
    row_start, row_first, row_slot, row_tail, row_closing,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr, HAS_SINKS: tl.constexpr, GROUPED: tl.constexpr, CONTINUED: tl.constexpr,
    EARLY: tl.constexpr, BORDERS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of AT_ONCE tokens of one head, each weighted by the sum that it was divided by.

    A program is that of a token or, with BORDERS, of a border of two shares: the first one inside a row merges it.
    """
    head, number = tl.program_id(0), tl.program_id(1)
    size = _size_of_shares(page_bounds, rows, shares, least_cells)
    if BORDERS:
        first_token = 0
        row = tl.minimum(_row_of((number + 1) * size, page_bounds, rows), rows - 1)
    else:
        first_token = number % TOKENS
        row = number // TOKENS
    first_share = tl.load(page_bounds + row) // size
    last_share = (tl.load(page_bounds + row + 1) - 1) // size
    first, length = _tokens_of(row, row_first, TOKENS)
    # Wait even if there is nothing to merge: kernels that wait for this one rely on the one before it too.
    wait(EARLY)
    is_first_border = first_share == number if BORDERS else True
    if (first_share >= last_share) | (first_token >= length) | (not is_first_border):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    feature = tl.arange(0, BLOCK_DIM)
    is_feature = feature < HEAD_DIM
    token = first_token + tl.arange(0, AT_ONCE)
    is_token, line = token < tl.minimum(length, TOKENS), token * GROUP + head % GROUP
    # A sink is a part of its own, without values.
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E if HAS_SINKS else float("-inf")
    peak = tl.zeros([AT_ONCE], tl.float32) + sink
    total = tl.full([AT_ONCE], 1.0 if HAS_SINKS else 0.0, tl.float32)
    mixed = tl.zeros([AT_ONCE, BLOCK_DIM], tl.float32)
    # Where rows are many, most of those that a border cuts have two parts.
    BLOCK: tl.constexpr = 16 if AT_ONCE == 1 else (4 if AT_ONCE <= 8 else 2)
    has_two = last_share == first_share + 1 if BORDERS else False
    if has_two:
        peak, total, mixed = _add_parts(
            peak, total, mixed, parts_ptr, first_share, first_share, last_share, shares, head, line, is_token,
            HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TOKENS, 2,
        )  # fmt: skip
    else:
        for share in range(first_share, last_share + 1, BLOCK):
            peak, total, mixed = _add_parts(
                peak, total, mixed, parts_ptr, share, first_share, last_share, shares, head, line, is_token,
                HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TOKENS, BLOCK,
            )  # fmt: skip
    packed = _packed(first + token, is_token, member_token, GROUPED)
    out_at = packed[:, None] * out_token_stride + head * HEAD_DIM + feature[None, :]
    is_output = is_token[:, None] & is_feature[None, :]
    tl.store(out_ptr + out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_output)
    if GROUPED:
        tl.store(prefix_sums_ptr + packed * HEADS + head, peak + tl.log2(total), mask=is_token)


@triton.jit
def _add_parts(
    peak, total, mixed, parts_ptr, share, first_share, last_share, shares, head, line, is_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of BLOCK shares to the running softmax of some tokens."""
    feature = tl.arange(0, BLOCK_DIM)
    share += tl.arange(0, BLOCK)
    known = is_token[:, None] & (share <= last_share)[None, :]
    begins = (share == first_share).to(tl.int32)
    which = ((head // GROUP * shares + share) * 2 + begins)[None, :] * (TOKENS * GROUP) + line[:, None]
    part_at = which[:, :, None] * HEAD_DIM + feature[None, None, :]
    parts = tl.load(parts_ptr + part_at, mask=known[:, :, None] & (feature < HEAD_DIM)[None, None, :], other=0.0)
    sums_at = shares * (2 * TOKENS * HEADS * HEAD_DIM) + which
    sums = tl.load(parts_ptr + sums_at, mask=known, other=float("-inf"))
    new_peak = tl.maximum(peak, tl.max(sums, 1))
    # Nothing seen yet: any finite number works.
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(sums - reference[:, None])
    fading = tl.exp2(peak - reference)
    mixed = mixed * fading[:, None] + tl.sum(weights[:, :, None] * parts, 1)
    return new_peak, total * fading + tl.sum(weights, 1), mixed
