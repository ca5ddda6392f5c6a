"""The likeliest token of every row, and random ones, in a few passes over the vocabulary and without sorting it.

A row is cut into chunks, one program each; a second kernel joins them. Weights are whole numbers, exp(x) * 2**40, so
their sums are exact: no order of additions and no company of other rows can change what a row draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.cuda.launching import jit, power_of_two
from weft.kernels.cuda.ordering import rising_key
from weft.kernels.cuda.overlap import early, wait

# Tokens of a program that looks for the greatest, and of one that adds up weights.
LIKELIEST_CHUNK = 8192
CHUNK = tl.constexpr(4096)
# A weight of 1, that of the likeliest token. With 2**18 tokens sums stay below 2**63.
UNIT = tl.constexpr(float(2**40))
LEAST_KEY = tl.constexpr(-(2**31))
NOWHERE = tl.constexpr(2**31 - 1)


def likeliest(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The token of the greatest logit, the first of equals."""
    return find_likeliest(logits, torch.int64, None, None)


def take_likeliest(
    logits: Float[Tensor, "rows vocab"], board: Int[Tensor, " seats"], seat: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """The same, in 32 bits, and to the rows' seats on the board. Both may be recorded in a graph."""
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
            logits, best[0], best[1], logits.stride(0), vocab, BLOCK=LIKELIEST_CHUNK, num_warps=8, **early(logits)
        )
        likeliest_kernel[(rows,)](
            best[0], best[1], token, board, seat, chunks, BLOCK=power_of_two(chunks), num_warps=1, **early(logits)
        )
    return token


@jit
def likeliest_chunk_kernel(logits, best_key, best_token, stride, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    key = tl.where(real, rising_key(tl.load(logits + row * stride + token, mask=real, other=0.0)), LEAST_KEY)
    greatest = tl.max(key, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_key + place, greatest)
    tl.store(best_token + place, tl.min(tl.where(real & (key == greatest), token, NOWHERE), 0))


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
    """The token at a row's seat where `from_board` is not 0, the known one elsewhere."""
    token = torch.empty_like(known)
    if len(token):
        block = power_of_two(len(token))
        read_board_kernel[(1,)](board, seat, from_board, known, token, len(token), BLOCK=block, num_warps=4)
    return token


@jit(do_not_specialize=["rows"])
def read_board_kernel(board, seat, from_board, known, token, rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    real = row < rows
    wanted = real & (tl.load(from_board + row, mask=real, other=0) != 0)
    there = tl.load(board + tl.load(seat + row, mask=real, other=0), mask=wanted, other=0)
    value = tl.where(wanted, there.to(token.dtype.element_ty), tl.load(known + row, mask=real, other=0))
    tl.store(token + row, value, mask=real)


def draw(
    logits: Float[Tensor, "draws vocab"],
    temperature: Float[Tensor, " draws"],
    log_min_p: Float[Tensor, " draws"],
    uniform: Float[Tensor, " draws"],
    top_k: Int[Tensor, " draws"],
    top_p: Float[Tensor, " draws"],
    ordered: bool,
) -> Int[Tensor, " draws"]:
    """A random token per row. `ordered`: whether top-k or top-p apply to any row at all."""
    from weft.kernels.cuda.sampling_floor import floors

    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK.value)
    grid, block = (rows, chunks), power_of_two(chunks)
    greatest = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    greatest_kernel[grid](logits, greatest, logits.stride(0), vocab, num_warps=4)
    floor = log_min_p
    if ordered:
        floor = floors(logits, greatest, temperature, log_min_p, top_k, top_p)
    chunk_sum_kernel[grid](logits, greatest, temperature, floor, sums, logits.stride(0), vocab, BLOCK=block)
    draw_kernel[(rows,)](
        logits, greatest, temperature, floor, uniform, sums, token, logits.stride(0), vocab, chunks, BLOCK=block
    )
    return token


@jit
def greatest_kernel(logits, greatest, stride, vocab):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    tl.store(greatest + row * tl.num_programs(1) + tl.program_id(1), tl.max(value.to(tl.float32), 0))


@triton.jit
def scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """(logit - greatest) / temperature of a chunk: the likeliest token has 0. Beyond the end: minus infinity."""
    below, heat = chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    return tl.div_rn(below, heat)


@triton.jit
def chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """How far the logits of a chunk are from the row's greatest, and the temperature."""
    place = tl.arange(0, BLOCK)
    top = tl.max(tl.load(greatest + row * chunks + place, mask=place < chunks, other=float("-inf")), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return value - top, tl.load(temperature + row)


@triton.jit
def weight(scaled):
    return (tl.exp(scaled) * UNIT).to(tl.int64)


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
    """The first token at which the running sum of weights passes the row's share of them all."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    own = tl.load(sums + row * chunks + place, mask=place < chunks, other=0)
    until = tl.cumsum(own, 0)
    target = (tl.load(uniform + row).to(tl.float64) * tl.sum(own, 0).to(tl.float64)).to(tl.int64)
    # Only where logits are not numbers can the target lie beyond the end; the token must exist all the same.
    chunk = tl.minimum(tl.sum(((until <= target) & (place < chunks)).to(tl.int32), 0), chunks - 1)
    before = tl.sum(tl.where(place < chunk, own, 0), 0)
    scaled = scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    kept = scaled >= tl.load(floor + row)
    running = before + tl.cumsum(weight(tl.where(kept, scaled, float("-inf"))), 0)
    token = chunk * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
    tl.store(result + row, tl.minimum(token, vocab - 1).to(tl.int64))
