"""The smallest logit that min-p, then top-k, then top-p keep, without sorting the vocabulary.

First, all tokens are counted and weighed at a few levels below the maximum. The tokens above the highest level that
surely reaches the floor, mostly a few hundred, are compacted, and bisection finds the floor among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.sampling.weights import chunk_below, weight

# Level n lies (n + 1)**2 times this below the maximum: levels are close together where tokens are few. Below the last
# one no token has a weight: exp(-28) * 2**40 < 1. The numbers are exact, so all kernels see the same.
LEVELS = tl.constexpr(8)
LEVEL_UNIT = tl.constexpr(-28.0 / 64)
# Sums at levels are rounded, so a level must exceed its target by this margin.
MARGIN = tl.constexpr(1.001)
SEARCH_BLOCK = 4096


def floors(
    logits: Float[Tensor, "n vocab"],
    greatest: Float[Tensor, "n chunks"],
    temperature: Float[Tensor, " n"],
    log_min_p: Float[Tensor, " n"],
    top_k: Int[Tensor, " n"],
    top_p: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Return the floors. A logit equal to the floor is kept. Rows without top-k and top-p have min-p's."""
    (rows, vocab), chunks, device = logits.shape, greatest.shape[1], logits.device
    counts = torch.empty(rows, chunks, LEVELS.value, dtype=torch.int32, device=device)
    masses = torch.empty(rows, chunks, LEVELS.value, dtype=torch.float32, device=device)
    totals = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    levels = torch.empty(rows, dtype=torch.int32, device=device)
    starts = torch.empty(rows, chunks + 1, dtype=torch.int32, device=device)
    likely = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    floor = torch.empty(rows, dtype=torch.float32, device=device)
    grid, block = (rows, chunks), power_of_two(chunks)
    row_inputs = named(
        logits=logits, stride=logits.stride(0), vocab=vocab, greatest=greatest, temperature=temperature, top_k=top_k,
        top_p=top_p,
    )  # fmt: skip
    weigh_kernel[grid](
        row_inputs, named(log_min_p=log_min_p, counts=counts, masses=masses, totals=totals), BLOCK=block
    )  # fmt: skip
    level_kernel[(rows,)](
        named(
            counts=counts, masses=masses, top_k=top_k, top_p=top_p, levels=levels, starts=starts, vocab=vocab,
            chunks=chunks,
        ),
        BLOCK=block, num_warps=2,
    )  # fmt: skip
    collect_kernel[grid](row_inputs, named(levels=levels, starts=starts, likely=likely), BLOCK=block)
    floor_kernel[(rows,)](
        named(
            likely=likely, levels=levels, starts=starts, totals=totals, log_min_p=log_min_p, top_k=top_k,
            top_p=top_p, floor=floor, vocab=vocab, chunks=chunks,
        ),
        BLOCK=block, SEARCH=SEARCH_BLOCK, num_warps=8,
    )  # fmt: skip
    return floor


@triton.jit
def level_value(level):
    return (level + 1) * (level + 1) * LEVEL_UNIT


@triton.jit
def is_free(top_k, top_p, row, vocab):
    """Return whether neither top-k nor top-p applies to the row."""
    return (tl.load(top_k + row) >= vocab) & (tl.load(top_p + row) >= 1.0)


@jit
def weigh_kernel(
    logits, stride, vocab, greatest, temperature, top_k, top_p, log_min_p, counts, masses, totals, BLOCK: tl.constexpr
):
    """Count a chunk's tokens above every level and, where top-p decides alone, sum their weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    if is_free(top_k, top_p, row, vocab):
        return
    below, heat = chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    place = row * chunks + chunk
    for level in tl.static_range(LEVELS):
        tl.store(counts + place * LEVELS + level, tl.sum((below >= heat * level_value(level)).to(tl.int32), 0))
    if tl.load(top_k + row) >= vocab:
        scaled = tl.div_rn(below, heat)
        mass = tl.exp(scaled)
        for level in tl.static_range(LEVELS):
            above = below >= heat * level_value(level)
            tl.store(masses + place * LEVELS + level, tl.sum(tl.where(above, mass, 0.0), 0))
        kept = scaled >= tl.load(log_min_p + row)
        tl.store(totals + place, tl.sum(weight(tl.where(kept, scaled, float("-inf"))), 0))


@jit
def level_kernel(counts, masses, top_k, top_p, levels, starts, vocab, chunks, BLOCK: tl.constexpr):
    """Find the highest level above which lie all tokens that top-k and top-p may keep, and each chunk's destination."""
    row = tl.program_id(0).to(tl.int64)
    if is_free(top_k, top_p, row, vocab):
        return
    chunk, level = tl.arange(0, BLOCK), tl.arange(0, LEVELS)
    index = (row * chunks + chunk)[:, None] * LEVELS + level[None, :]
    real = (chunk < chunks)[:, None]
    count = tl.load(counts + index, mask=real, other=0)
    most = tl.load(top_k + row)
    enough = tl.sum(count, 0) >= most
    if most >= vocab:
        mass = tl.sum(tl.load(masses + index, mask=real, other=0.0), 0)
        enough = mass >= tl.load(top_p + row) * tl.max(mass, 0) * MARGIN
    found = tl.min(tl.where(enough, level, LEVELS - 1), 0)
    ours = tl.sum(tl.where(level[None, :] == found, count, 0), 1)
    until = tl.cumsum(ours, 0)
    tl.store(levels + row, found)
    tl.store(starts + row * (chunks + 1) + chunk + 1, until, mask=chunk < chunks)
    tl.store(starts + row * (chunks + 1), 0)


@jit
def collect_kernel(
    logits, stride, vocab, greatest, temperature, top_k, top_p, levels, starts, likely, BLOCK: tl.constexpr
):
    """Compact the tokens above the row's level."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    if is_free(top_k, top_p, row, vocab):
        return
    start = tl.load(starts + row * (chunks + 1) + chunk)
    if tl.load(starts + row * (chunks + 1) + chunk + 1) == start:
        return
    below, heat = chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    above = below >= heat * level_value(tl.load(levels + row))
    target = start + tl.cumsum(above.to(tl.int32), 0) - 1
    tl.store(likely + row * vocab + target, tl.div_rn(below, heat), mask=above)


@jit
def floor_kernel(
    likely, levels, starts, totals, log_min_p, top_k, top_p, floor, vocab, chunks,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    least, most, share = tl.load(log_min_p + row), tl.load(top_k + row).to(tl.int64), tl.load(top_p + row)
    if is_free(top_k, top_p, row, vocab):
        tl.store(floor + row, least)
        return
    length = tl.load(starts + row * (chunks + 1) + chunks)
    ours = likely + row * vocab
    found = tl.maximum(least, level_value(tl.load(levels + row)))
    if most < vocab:
        found = search(ours, length, found, most, False, SEARCH)
        count, mass, _, _ = measure(ours, length, found, True, SEARCH)
        # Of the tokens equal to the last one, top-p counts only as many as top-k asks for.
        mass -= tl.maximum(count - most, 0) * weight(found)
    else:
        place = tl.arange(0, BLOCK)
        mass = tl.sum(tl.load(totals + row * chunks + place, mask=place < chunks, other=0), 0)
    if share < 1.0:
        # Reaching it exactly is enough, so round up.
        wanted = tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        found = search(ours, length, found, wanted, True, SEARCH)
    tl.store(floor + row, found)


@triton.jit
def search(values, length, lowest, wanted, BY_MASS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the greatest value that has the wanted count, or mass, at or above it; `lowest` if no value does."""
    count, mass, low, _ = measure(values, length, lowest, BY_MASS, SEARCH)
    high = 0.0
    # Above `high` there is too little, from `low` on there is enough; both are among the values.
    if (mass if BY_MASS else count) < wanted:
        low = lowest
        high = lowest
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        count, mass, above, below = measure(values, length, middle, BY_MASS, SEARCH)
        enough = (mass if BY_MASS else count) >= wanted
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit
def measure(values, length, threshold, WITH_MASS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the count, mass and smallest of the values at or above the threshold, and the greatest below."""
    count = tl.zeros([SEARCH], tl.int32)
    mass = tl.zeros([SEARCH], tl.int64)
    above = tl.full([SEARCH], float("inf"), tl.float32)
    below = tl.full([SEARCH], float("-inf"), tl.float32)
    for begin in range(0, length, SEARCH):
        place = begin + tl.arange(0, SEARCH)
        value = tl.load(values + place, mask=place < length, other=float("-inf"))
        reached = value >= threshold
        count += reached.to(tl.int32)
        above = tl.minimum(above, tl.where(reached, value, float("inf")))
        below = tl.maximum(below, tl.where(reached, float("-inf"), value))
        if WITH_MASS:
            mass += weight(tl.where(reached, value, float("-inf")))
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)
