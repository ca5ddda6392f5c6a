"""Random tokens, in a few passes over the vocabulary and without sorting it."""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.sampling.floor import floors
from weft.kernels.cuda.sampling.weights import CHUNK, scaled_chunk, weight
from weft.kernels.sampling import Draws


def draw(logits: Float[Tensor, "draws vocab"], draws: Draws) -> Int[Tensor, " draws"]:
    """Return a random token for each row."""
    temperature, uniform = draws.temperature, draws.uniform
    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK.value)
    grid, block = (rows, chunks), power_of_two(chunks)
    greatest = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    greatest_kernel[grid](
        named(logits=logits, greatest=greatest, stride=logits.stride(0), vocab=vocab),
        num_warps=4,
    )  # fmt: skip
    floor = draws.log_min_p
    if any(draws.ordered):
        floor = floors(logits, greatest, temperature, floor, draws.top_k, draws.top_p)
    chunk_sum_kernel[grid](
        named(
            logits=logits, greatest=greatest, temperature=temperature, floor=floor, sums=sums,
            stride=logits.stride(0), vocab=vocab,
        ),
        BLOCK=block,
    )  # fmt: skip
    draw_kernel[(rows,)](
        named(
            logits=logits, greatest=greatest, temperature=temperature, floor=floor, uniform=uniform, sums=sums,
            result=token, stride=logits.stride(0), vocab=vocab, chunks=chunks,
        ),
        BLOCK=block,
    )  # fmt: skip
    return token


@jit
def greatest_kernel(logits, greatest, stride, vocab):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    tl.store(greatest + row * tl.num_programs(1) + tl.program_id(1), tl.max(value.to(tl.float32), 0))


@jit
def chunk_sum_kernel(logits, greatest, temperature, floor, sums, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    scaled = scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    kept = scaled >= tl.load(floor + row)
    tl.store(sums + row * chunks + chunk, tl.sum(weight(tl.where(kept, scaled, float("-inf"))), 0))


@jit
def draw_kernel(
    logits, greatest, temperature, floor, uniform, sums, result, stride, vocab, chunks, BLOCK: tl.constexpr
):
    """Find the first token at which the cumulative weight exceeds the row's share of the total."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    own = tl.load(sums + row * chunks + place, mask=place < chunks, other=0)
    until = tl.cumsum(own, 0)
    target = (tl.load(uniform + row).to(tl.float64) * tl.sum(own, 0).to(tl.float64)).to(tl.int64)
    # The target can lie beyond the end only if logits are NaN; the token must still exist.
    chunk = tl.minimum(tl.sum(((until <= target) & (place < chunks)).to(tl.int32), 0), chunks - 1)
    before = tl.sum(tl.where(place < chunk, own, 0), 0)
    scaled = scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    kept = scaled >= tl.load(floor + row)
    running = before + tl.cumsum(weight(tl.where(kept, scaled, float("-inf"))), 0)
    token = chunk * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
    tl.store(result + row, tl.minimum(token, vocab - 1).to(tl.int64))
