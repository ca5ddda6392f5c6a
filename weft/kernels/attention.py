"""Constants of an attention layer, shared by all backends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Constants of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    norm_eps: float = 0.0  # of the query and key norms, if the layer has them
    gated: bool = False  # gates follow the values in the projection; their sigmoid multiplies the output
