"""Sampling of tokens, and log-probabilities, on a CPU.

Every operation computes each row independently of its neighbours. There is no `sum` over the vocabulary, because its
order of additions depends on the number of rows. So a row's result depends only on its logits and its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.plain.sampling import digest
from weft.kernels.sampling import Draws

__all__ = [
    "digest",
    "draw",
    "for_sampling",
    "likeliest",
    "read_board",
    "restrict",
    "score",
    "take_likeliest",
]

# Up to this number of elements one thread draws and scores. PyTorch's threads would be faster, but they wait for more
# work for a while, on cores that ours need for the next step.
ALONE_ELEMENTS = 1 << 19
# Rows per chunk of sampling and scoring, so that temporaries stay in the cache.
CHUNK_ELEMENTS = 1 << 18


# From this number of elements on PyTorch starts its threads, which takes longer than to widen a few times as many with
# NumPy. (Not in a recorded step: a recording does not see NumPy.)
THREADED_ELEMENTS = 1 << 15


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Let PyTorch use one thread for so few elements.

    The number is the calling thread's own; but a thread that uses PyTorch for the first time meanwhile begins with one.
    """
    threads = torch.get_num_threads()
    if threads == 1 or elements > ALONE_ELEMENTS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def for_sampling(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    if logits.dtype == torch.bfloat16 and THREADED_ELEMENTS <= logits.numel() <= CHUNK_ELEMENTS:
        wide = logits.view(torch.int16).numpy().astype(np.uint32)
        wide <<= 16
        return torch.from_numpy(wide.view(np.float32))
    return logits.float()


def likeliest(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    # NumPy's argmax is 20 times as fast as PyTorch's here.
    return torch.from_numpy(logits.float().numpy().argmax(-1))


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
    # 20 times as fast as PyTorch, which would also start its threads for a few rows: those then keep the cores of ours.
    bits = np.unpackbits(allowed.numpy(), axis=-1, count=logits.shape[-1], bitorder="little")
    return torch.from_numpy(np.where(bits.view(np.bool_), logits.numpy(), np.float32(-np.inf)))


def draw(logits: Float[Tensor, "draws vocab"], draws: Draws) -> Int[Tensor, " draws"]:
    """Return a random token for each row, by the inverse CDF at the row's own random number."""
    with threads_for(logits.numel()):
        chunks = [_draw_chunk(logits[low:high], draws, low, high) for low, high in _chunks(logits)]
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]


def _chunks(logits: Tensor) -> Iterator[tuple[int, int]]:
    rows, vocab = logits.shape
    step = max(1, CHUNK_ELEMENTS // vocab)
    return ((low, min(low + step, rows)) for low in range(0, rows, step))


def _draw_chunk(logits: Float[Tensor, "n vocab"], draws: Draws, low: int, high: int) -> Int[Tensor, " n"]:
    # With the maximum at 0 no temperature overflows, and min-p is a threshold that needs no normalisation.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(draws.temperature[low:high, None])
    if any(draws.filtered[low:high]):
        least = draws.log_min_p[low:high, None]
        if any(draws.ordered[low:high]):
            floor = least_likely_kept(scaled, least, draws.top_k[low:high], draws.top_p[low:high])
            # Rows without top-k and top-p keep all that min-p keeps: an unlimited row's floor may round tokens away.
            free = (draws.top_k[low:high] == logits.shape[-1]) & (draws.top_p[low:high] == 1)
            least = torch.where(free[:, None], least, floor)
        scaled.masked_fill_(scaled < least, -torch.inf)
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = draws.uniform[low:high, None].double() * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # The target can lie beyond the end only if logits are NaN; the token must still exist.
    return token.clamp_(max=logits.shape[-1] - 1)


def least_likely_kept(
    scaled: Float[Tensor, "n vocab"],
    log_min_p: Float[Tensor, "n 1"],
    top_k: Int[Tensor, " n"],
    top_p: Float[Tensor, " n"],
) -> Float[Tensor, "n 1"]:
    """Return the smallest logit that min-p, then top-k, then top-p keep; logits equal to it are kept too.

    Each filter keeps a prefix of the vocabulary in descending order, so one count describes all three.
    """
    rising = ascending(scaled)
    falling = rising.flip(-1)
    mass = falling.softmax(-1).cumsum(-1, dtype=torch.float64)
    likely = scaled.shape[-1] - torch.searchsorted(rising, log_min_p)
    # At least one, even if logits are NaN and no comparison holds.
    count = torch.minimum(top_k[:, None], likely).clamp_(min=1)
    # top-p is a share of what the other filters keep: the smallest prefix that reaches it.
    share = top_p[:, None].double() * mass.gather(-1, count - 1)
    count = torch.minimum(count, torch.searchsorted(mass, share) + 1)
    return falling.gather(-1, count - 1)


def ascending(values: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    # 30 times as fast as PyTorch's sort, which also moves indices.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def score(
    logits: Float[Tensor, "n vocab"], chosen: Int[Tensor, " n"], top: int
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"], Float[Tensor, "n top"]]:
    # Ranking takes seven times the memory of the logits themselves.
    with threads_for(logits.numel()):
        parts = [_score_chunk(logits[low:high], chosen[low:high], top) for low, high in _chunks(logits)]
        own, likely, logprobs = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return own, likely, logprobs


def _score_chunk(
    logits: Float[Tensor, "n vocab"], chosen: Int[Tensor, " n"], top: int
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"], Float[Tensor, "n top"]]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, chosen[:, None]).squeeze(-1)
    likely = _ranked(logprobs, top)
    return own, likely, logprobs.gather(-1, likely)


def _ranked(values: Float[Tensor, "n vocab"], top: int) -> Int[Tensor, "n top"]:
    """Return the tokens of the greatest values, the first among equals, so that the result does not depend on `top`."""
    if top == 0:
        return torch.empty(len(values), 0, dtype=torch.int64)
    top = min(top, values.shape[-1])
    bits = values.view(torch.int32)
    # The bits of floats sort like their values once those of negative floats are flipped.
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place = torch.arange(values.shape[-1])
    return ((rising << 32) - place).topk(top, dim=-1).indices
