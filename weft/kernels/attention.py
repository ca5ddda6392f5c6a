"""What an attention layer is, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The constants of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    norm_eps: float = 0.0  # of the norms of queries and keys, where the layer has them
    gated: bool = False  # gates follow the values in the projection; their sigmoid multiplies the output
