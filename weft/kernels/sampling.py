"""What a sampler hands to its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw their token at random; the others take the likeliest."""

    row: Tensor  # [draws] sampled row
    temperature: Tensor  # [draws]
    log_min_p: Tensor  # [draws] minus infinity is off
    uniform: Tensor  # [draws]
    filtered: tuple[bool, ...]  # host: whether min-p, top-k or top-p apply
    ordered: tuple[bool, ...]  # host: whether top-k or top-p do, so that the vocabulary has to be ordered
    top_k: Tensor  # [draws] the vocabulary's size is off
    top_p: Tensor  # [draws]
