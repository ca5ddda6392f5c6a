"""Most likely token of every row, in two passes over chunks of the vocabulary; re-exports the other sampling
operations.
"""

from __future__ import annotations

import torch
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.cuda.launch.launching import jit, named, power_of_two
from weft.kernels.cuda.launch.overlap import early, wait
from weft.kernels.cuda.ordering import rising_key
from weft.kernels.cuda.sampling.draw import draw
from weft.kernels.cuda.sampling.scores import score
from weft.kernels.plain.sampling import digest

__all__ = ["digest", "draw", "for_sampling", "likeliest", "read_board", "restrict", "score", "take_likeliest"]

# Tokens of a program that looks for the maximum, and its warps.
LIKELIEST_CHUNK, LIKELIEST_WARPS = 4096, 4
LEAST_KEY = tl.constexpr(-(2**31))
NOWHERE = tl.constexpr(2**31 - 1)


def for_sampling(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return logits unchanged: kernels accept any dtype."""
    return logits


def restrict(logits: Float[Tensor, "n vocab"], allowed: UInt8[Tensor, "n bytes"]) -> Float[Tensor, "n vocab"]:
    weight = (2 ** torch.arange(8, device=allowed.device)).to(torch.uint8)
    bits = ((allowed[:, :, None] & weight) != 0).flatten(1)[:, : logits.shape[-1]]
    return torch.where(bits, logits, -torch.inf)


def likeliest(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """Return the token with the greatest logit, the first among equals. Of NaN and others it may be any such token."""
    return find_likeliest(logits, torch.int64, None, None)


def take_likeliest(
    logits: Float[Tensor, "rows vocab"], board: Int[Tensor, " seats"], seat: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Return the most likely tokens in 32 bits, and write them to the rows' seats. A CUDA graph may record both."""
    return find_likeliest(logits, torch.int32, board, seat)


def find_likeliest(
    logits: Float[Tensor, "rows vocab"], dtype: torch.dtype, board: Tensor | None, seat: Tensor | None
) -> Int[Tensor, " rows"]:
    rows, vocab = logits.shape
    chunks = -(-vocab // LIKELIEST_CHUNK)
    best = torch.empty(2, rows, chunks, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=dtype, device=logits.device)
    if rows:
        likeliest_chunk_kernel[(rows, chunks)](
            named(logits=logits, best_key=best[0], best_token=best[1], stride=logits.stride(0), vocab=vocab),
            BLOCK=LIKELIEST_CHUNK, num_warps=LIKELIEST_WARPS, **early(logits),
        )  # fmt: skip
        likeliest_kernel[(rows,)](
            named(best_key=best[0], best_token=best[1], result=token, board=board, seat=seat, chunks=chunks),
            BLOCK=power_of_two(chunks), num_warps=1, **early(logits),
        )  # fmt: skip
    return token


@jit
def likeliest_chunk_kernel(logits, best_key, best_token, stride, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    # Comparing floats as they are takes half as long as by their keys. A maximum leaves NaN out if it can.
    greatest = tl.max(value, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_key + place, rising_key(greatest))
    # NaN is not less either, so there is always a token; what pads the last chunk comes after it.
    tl.store(best_token + place, tl.min(tl.where(value < greatest, NOWHERE, token), 0))


@jit
def likeliest_kernel(best_key, best_token, result, board, seat, chunks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    key = tl.load(best_key + row * chunks + chunk, mask=chunk < chunks, other=LEAST_KEY)
    token = tl.load(best_token + row * chunks + chunk, mask=chunk < chunks, other=NOWHERE)
    chosen = tl.min(tl.where(key == tl.max(key, 0), token, NOWHERE), 0)
    tl.store(result + row, chosen.to(result.dtype.element_ty))
    if board is not None:
        tl.store(board + tl.load(seat + row), chosen.to(board.dtype.element_ty))


def read_board(
    board: Int[Tensor, " seats"],
    seat: Int[Tensor, " rows"],
    from_board: Int[Tensor, " rows"],
    known: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Return the token at a row's seat where `from_board` is not 0, and the known token elsewhere."""
    token = torch.empty_like(known)
    if len(token):
        block = power_of_two(len(token))
        read_board_kernel[(1,)](
            named(board=board, seat=seat, from_board=from_board, known=known, token=token, rows=len(token)),
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return token


@jit(do_not_specialize=["rows"])
def read_board_kernel(board, seat, from_board, known, token, rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    real = row < rows
    wanted = real & (tl.load(from_board + row, mask=real, other=0) != 0)
    there = tl.load(board + tl.load(seat + row, mask=real, other=0), mask=wanted, other=0)
    value = tl.where(wanted, there.to(token.dtype.element_ty), tl.load(known + row, mask=real, other=0))
    tl.store(token + row, value, mask=real)
