"""The smallest logit that min-p, then top-k, then top-p keep, without sorting the vocabulary.

First all tokens are counted and weighed at a few levels below the likeliest. The tokens above the highest level that
surely reaches the floor are copied side by side, mostly a few hundred, and the floor is found among them by halving.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.sampling import scaled_chunk, weight

# Level n lies (n + 1)**2 times this below the likeliest token: close together where the tokens are few. Below the last
# one nothing has a weight: exp(-28) * 2**40 < 1. The numbers are exact, so all kernels see the same.
LEVELS = tl.constexpr(8)
LEVEL_UNIT = tl.constexpr(-28.0 / 64)
# Sums at levels are rounded; a level must reach more than asked for by so much.
MARGIN = tl.constexpr(1.001)
SEARCH_BLOCK = 2048


def floors(
    logits: Float[Tensor, "n vocab"],
    greatest: Float[Tensor, "n chunks"],
    temperature: Float[Tensor, " n"],
    log_min_p: Float[Tensor, " n"],
    top_k: Int[Tensor, " n"],
    top_p: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """What equals the floor is kept. Rows without top-k and top-p have min-p's."""
    rows, vocab = logits.shape
    chunks = greatest.shape[1]
    device = logits.device
    counts = torch.empty(rows, chunks, LEVELS.value, dtype=torch.int32, device=device)
    masses = torch.empty(rows, chunks, LEVELS.value, dtype=torch.float32, device=device)
    totals = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    likely = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    floor = torch.empty(rows, dtype=torch.float32, device=device)
    grid, block = (rows, chunks), triton.next_power_of_2(chunks)
    weigh_kernel[grid](
        logits, greatest, temperature, log_min_p, counts, masses, totals, logits.stride(0), vocab, BLOCK=block
    )
    collect_kernel[grid](
        logits, greatest, temperature, counts, masses, top_k, top_p, likely, logits.stride(0), vocab, BLOCK=block
    )
    floor_kernel[(rows,)](
        likely, counts, masses, totals, log_min_p, top_k, top_p, floor, vocab, chunks,
        BLOCK=block, SEARCH=SEARCH_BLOCK, num_warps=8,
    )  # fmt: skip
    return floor


@triton.jit
def level_value(level):
    return (level + 1) * (level + 1) * LEVEL_UNIT


@triton.jit
def weigh_kernel(logits, greatest, temperature, log_min_p, counts, masses, totals, stride, vocab, BLOCK: tl.constexpr):
    """How many tokens of a chunk there are above every level, and how much they weigh."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    scaled = scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    mass = tl.exp(scaled)
    place = row * chunks + chunk
    for level in tl.static_range(LEVELS):
        above = scaled >= level_value(level)
        tl.store(counts + place * LEVELS + level, tl.sum(above.to(tl.int32), 0))
        tl.store(masses + place * LEVELS + level, tl.sum(tl.where(above, mass, 0.0), 0))
    kept = scaled >= tl.load(log_min_p + row)
    tl.store(totals + place, tl.sum(weight(tl.where(kept, scaled, float("-inf"))), 0))


@triton.jit
def level_of(counts, masses, top_k, top_p, row, chunks, vocab, BLOCK: tl.constexpr):
    """The highest level above which everything is that top-k and top-p may keep."""
    place, level = tl.arange(0, BLOCK), tl.arange(0, LEVELS)
    index = (row * chunks + place)[:, None] * LEVELS + level[None, :]
    real = (place < chunks)[:, None]
    count = tl.sum(tl.load(counts + index, mask=real, other=0), 0)
    mass = tl.sum(tl.load(masses + index, mask=real, other=0.0), 0)
    most = tl.load(top_k + row)
    share = tl.load(top_p + row) * tl.max(mass, 0) * MARGIN
    enough = tl.where(most < vocab, count >= most, mass >= share)
    return tl.min(tl.where(enough, level, LEVELS - 1), 0)


@triton.jit
def collect_kernel(
    logits, greatest, temperature, counts, masses, top_k, top_p, likely, stride, vocab, BLOCK: tl.constexpr
):
    """Copy what is above the row's level, side by side and in order."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    if (tl.load(top_k + row) >= vocab) & (tl.load(top_p + row) >= 1.0):
        return
    level = level_of(counts, masses, top_k, top_p, row, chunks, vocab, BLOCK)
    place = tl.arange(0, BLOCK)
    before = tl.load(counts + (row * chunks + place) * LEVELS + level, mask=place < chunk, other=0)
    scaled = scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    above = scaled >= level_value(level)
    target = tl.sum(before, 0) + tl.cumsum(above.to(tl.int32), 0) - 1
    tl.store(likely + row * vocab + target, scaled, mask=above)


@triton.jit
def floor_kernel(
    likely, counts, masses, totals, log_min_p, top_k, top_p, floor, vocab, chunks,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    least, most, share = tl.load(log_min_p + row), tl.load(top_k + row).to(tl.int64), tl.load(top_p + row)
    if (most >= vocab) & (share >= 1.0):
        tl.store(floor + row, least)
        return
    level = level_of(counts, masses, top_k, top_p, row, chunks, vocab, BLOCK)
    place = tl.arange(0, BLOCK)
    length = tl.sum(tl.load(counts + (row * chunks + place) * LEVELS + level, mask=place < chunks, other=0), 0)
    ours = likely + row * vocab
    found = tl.maximum(least, level_value(level))
    mass = tl.sum(tl.load(totals + row * chunks + place, mask=place < chunks, other=0), 0)
    if most < vocab:
        found = search(ours, length, found, most, False, SEARCH)
        count, mass, _, _ = measure(ours, length, found, True, SEARCH)
        # Of those that equal the last one, top-p counts only as many as top-k asked for.
        mass -= tl.maximum(count - most, 0) * weight(found)
    if share < 1.0:
        # Reached exactly is enough, so round up.
        wanted = tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        found = search(ours, length, found, wanted, True, SEARCH)
    tl.store(floor + row, found)


@triton.jit
def search(values, length, lowest, wanted, BY_MASS: tl.constexpr, SEARCH: tl.constexpr):
    """The greatest of the values with so many, or so much mass, at or above it; `lowest` if that has not enough."""
    count, mass, low, _ = measure(values, length, lowest, BY_MASS, SEARCH)
    high = 0.0
    # All above `high` is too little, all from `low` on is enough; both are among the values.
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
    """How many values are at or above the threshold, their mass, the smallest of them and the greatest below."""
    count = tl.zeros([SEARCH], tl.int64)
    mass = tl.zeros([SEARCH], tl.int64)
    above = tl.full([SEARCH], float("inf"), tl.float32)
    below = tl.full([SEARCH], float("-inf"), tl.float32)
    for begin in range(0, length, SEARCH):
        place = begin + tl.arange(0, SEARCH)
        value = tl.load(values + place, mask=place < length, other=float("-inf"))
        reached = value >= threshold
        count += reached.to(tl.int64)
        above = tl.minimum(above, tl.where(reached, value, float("inf")))
        below = tl.maximum(below, tl.where(reached, float("-inf"), value))
        if WITH_MASS:
            mass += weight(tl.where(reached, value, float("-inf")))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)
