"""Sampling: cases for `benchmarks.kernels`, compared with plain torch operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.kernels.cuda import sampling
from weft.kernels.cuda.sampling import scores as sampling_scores
from weft.kernels.sampling import Draws

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]

DEVICE, VOCAB, ROWS = "cuda", 131_072, (1, 32, 256)
TOP_K, TOP_P, TOP_SCORES = 20, 0.95, 5


def cases() -> Iterator[Case]:
    for rows in ROWS:
        logits = torch.randn(rows, VOCAB, device=DEVICE, dtype=torch.bfloat16) * 3
        once = logits.nbytes
        yield likeliest(logits, once)
        yield f"{rows} draws from all", lambda logits=logits: drawn(logits, VOCAB, 1.0), once, {}
        yield (
            f"{rows} draws, top-k and top-p",
            lambda logits=logits: drawn(logits, TOP_K, TOP_P),
            once,
            {"torch, sorted": lambda logits=logits: drawn_by_sorting(logits)},
        )
        yield scored(logits, once)


def likeliest(logits: Tensor, once: int) -> Case:
    return (
        f"{len(logits)} likeliest tokens",
        lambda: sampling.likeliest(logits),
        once,
        {"torch argmax": lambda: logits.argmax(-1)},
    )


def scored(logits: Tensor, once: int) -> Case:
    chosen = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    return (
        f"{len(logits)} scores, {TOP_SCORES} likely tokens",
        lambda: sampling_scores.score(logits, chosen, TOP_SCORES),
        once,
        {"torch log_softmax, topk": lambda: logits.float().log_softmax(-1).topk(TOP_SCORES, -1)},
    )


def drawn(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    def every(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=DEVICE)

    ordered = (top_k < VOCAB or top_p < 1,) * len(logits)
    rows = torch.arange(len(logits), device=DEVICE)
    wishes = (every(1.0), every(-torch.inf), every(0.37), ordered, ordered, every(top_k, torch.int64), every(top_p))
    return sampling.draw(logits, Draws(rows, *wishes))


def drawn_by_sorting(logits: Tensor) -> Tensor:
    """Sort all rows, then draw among the tokens that top-k and top-p keep."""
    falling, order = logits.float().sort(-1, descending=True)
    kept = falling[:, :TOP_K].softmax(-1)
    total = kept.cumsum(-1)
    kept = kept.masked_fill(total - kept >= TOP_P * total[:, -1:], 0.0)
    total = kept.cumsum(-1)
    place = torch.searchsorted(total, 0.37 * total[:, -1:], right=True).clamp_(max=TOP_K - 1)
    return order.gather(-1, place).squeeze(-1)
