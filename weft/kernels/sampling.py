"""Inputs of the sampling operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that sample their token; the others take the most likely one."""

    row: Tensor  # [draws] sampled row
    temperature: Tensor  # [draws]
    log_min_p: Tensor  # [draws] minus infinity: off
    uniform: Tensor  # [draws]
    filtered: tuple[bool, ...]  # host: whether min-p, top-k or top-p apply
    ordered: tuple[bool, ...]  # host: whether top-k or top-p apply, so that the vocabulary must be sorted
    top_k: Tensor  # [draws] the vocabulary size: off
    top_p: Tensor  # [draws]
