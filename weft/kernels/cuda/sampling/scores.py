"""Log-probabilities of chosen and of the most likely tokens, without a sort or a second vocabulary-sized buffer.

Every chunk of a row returns its most likely token and its sum; the row takes the best of them and rereads only the
chunk that it came from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.ordering import rising_key
from weft.kernels.cuda.sampling.weights import CHUNK

NOTHING = tl.constexpr(-(2**63))


def score(
    logits: Float[Tensor, "n vocab"], chosen: Int[Tensor, " n"], top: int
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"], Float[Tensor, "n top"]]:
    rows, vocab = logits.shape
    device = logits.device
    top = min(top, vocab)
    chunks = -(-vocab // CHUNK.value)
    ranks = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    greatest = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    sums = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    likely = torch.empty(rows, top, dtype=torch.int64, device=device)
    values = torch.empty(rows, top, dtype=torch.float32, device=device)
    if rows:
        summary_kernel[(rows, chunks)](
            named(logits=logits, ranks=ranks, greatest=greatest, sums=sums, stride=logits.stride(0), vocab=vocab),
            num_warps=4,
        )  # fmt: skip
        score_kernel[(rows,)](
            named(
                logits=logits, ranks=ranks, greatest=greatest, sums=sums, chosen=chosen, own=own, likely=likely,
                values=values, stride=logits.stride(0), vocab=vocab, chunks=chunks, top=top,
            ),
            BLOCK=power_of_two(chunks), num_warps=4,
        )  # fmt: skip
    return own, likely, values


@triton.jit
def ranks_of(logits, row, chunk, stride, vocab):
    """Return a chunk's tokens as distinct numbers: greater logits rank higher, and of equals the first token."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    rank = (rising_key(value).to(tl.int64) << 32) - token
    return value, tl.where(token < vocab, rank, NOTHING)


@jit
def summary_kernel(logits, ranks, greatest, sums, stride, vocab):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    value, rank = ranks_of(logits, row, chunk, stride, vocab)
    place = row * tl.num_programs(1) + chunk
    top = tl.max(value, 0)
    # A chunk of banned tokens has no sum.
    tl.store(ranks + place, tl.max(rank, 0))
    tl.store(greatest + place, top)
    tl.store(sums + place, tl.sum(tl.where(value > float("-inf"), tl.exp(value - top), 0.0), 0))


@jit
def score_kernel(
    logits, ranks, greatest, sums, chosen, own, likely, values, stride, vocab, chunks, top, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    real = place < chunks
    maximum = tl.load(greatest + row * chunks + place, mask=real, other=float("-inf"))
    total = tl.load(sums + row * chunks + place, mask=real, other=0.0)
    shift = tl.max(maximum, 0)
    logarithm = tl.log(tl.sum(tl.where(total > 0, total * tl.exp(maximum - shift), 0.0), 0))
    token = tl.load(chosen + row).to(tl.int64)
    tl.store(own + row, tl.load(logits + row * stride + token).to(tl.float32) - shift - logarithm)
    best = tl.load(ranks + row * chunks + place, mask=real, other=NOTHING)
    for index in range(top):
        rank = tl.max(best, 0)
        # The lower half of a rank is minus the token.
        token = (-rank) & 0xFFFFFFFF
        tl.store(likely + row * top + index, token)
        tl.store(values + row * top + index, tl.load(logits + row * stride + token).to(tl.float32) - shift - logarithm)
        chunk = (token // CHUNK).to(tl.int32)
        _, ours = ranks_of(logits, row, chunk, stride, vocab)
        following = tl.max(tl.where(ours < rank, ours, NOTHING), 0)
        best = tl.where(place == chunk, following, best)
