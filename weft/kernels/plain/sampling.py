"""Sampling of tokens, and log-probabilities."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.sampling import Draws

# Odd numbers of 64 bits, as signed integers, and the elements of a digest computed at once.
COLUMN, MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)
DIGEST_ELEMENTS = 1 << 22


def for_sampling(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    return logits.float()


def likeliest(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    return logits.argmax(-1)


def take_likeliest(
    logits: Float[Tensor, "rows vocab"], board: Int[Tensor, " seats"], seat: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    tokens = likeliest(logits)
    board[seat] = tokens
    return tokens.int()


def read_board(
    board: Int[Tensor, " seats"],
    seat: Int[Tensor, " rows"],
    from_board: Int[Tensor, " rows"],
    known: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    return torch.where(from_board != 0, board[seat].to(known.dtype), known)


def restrict(logits: Float[Tensor, "n vocab"], allowed: UInt8[Tensor, "n bytes"]) -> Float[Tensor, "n vocab"]:
    weight = (2 ** torch.arange(8, device=allowed.device)).to(torch.uint8)
    bits = ((allowed[:, :, None] & weight) != 0).flatten(1)[:, : logits.shape[-1]]
    return torch.where(bits, logits, -torch.inf)


def draw(logits: Float[Tensor, "draws vocab"], draws: Draws) -> Int[Tensor, " draws"]:
    """Sample by inverse CDF from the tokens that min-p, then top-k, then top-p keep."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / draws.temperature[:, None]
    falling = scaled.sort(dim=-1, descending=True).values
    mass = falling.softmax(-1).cumsum(-1, dtype=torch.float64)
    # Each filter keeps a prefix of the vocabulary in descending order, so one count describes all three.
    count = torch.minimum(draws.top_k[:, None], (falling >= draws.log_min_p[:, None]).sum(-1, keepdim=True))
    count = count.clamp(min=1)
    share = draws.top_p[:, None].double() * mass.gather(-1, count - 1)
    count = torch.minimum(count, (mass < share).sum(-1, keepdim=True) + 1)
    floor = falling.gather(-1, count - 1)
    # Rows without top-k and top-p keep all that min-p keeps: an unlimited row's floor may round tokens away.
    free = (draws.top_k == logits.shape[-1]) & (draws.top_p == 1)
    floor = torch.where(free[:, None], draws.log_min_p[:, None], floor)
    cumulative = scaled.masked_fill(scaled < floor, -torch.inf).softmax(-1).cumsum(-1, dtype=torch.float64)
    target = draws.uniform[:, None].double() * cumulative[:, -1:]
    # The target can lie beyond the end only if logits are NaN; the token must still exist.
    return (cumulative <= target).sum(-1).clamp(max=logits.shape[-1] - 1)


def score(
    logits: Float[Tensor, "n vocab"], chosen: Int[Tensor, " n"], top: int
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"], Float[Tensor, "n top"]]:
    logprobs = logits.float().log_softmax(-1)
    # A stable sort returns the first among equals first, so the result does not depend on `top`.
    likely = logprobs.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    return logprobs.gather(-1, chosen[:, None].long()).squeeze(-1), likely, logprobs.gather(-1, likely)


def digest(logits: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
    """Hash every logit with its column and add up the hashes: a sum of integers is the same in any order."""
    step = max(1, DIGEST_ELEMENTS // logits.shape[-1])
    return torch.cat([_digest_rows(rows) for rows in logits.split(step)])


def _digest_rows(logits: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
    bits = logits.float().contiguous().view(torch.int32).long()
    column = torch.arange(1, logits.shape[-1] + 1, device=logits.device) * COLUMN
    mixed = (bits + column) * MULTIPLIER
    return ((mixed ^ (mixed >> 31)) * COLUMN).sum(-1)
