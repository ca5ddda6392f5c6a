"""Rows rounded to integers of eight bits, a scale for each 32 numbers: what CPUs multiply with stored formats."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# Numbers with one scale, and the largest integer.
BLOCK, LARGEST = 32, 127
# Blocks whose largest number is not above it become zeros: the inverse of their scale is no float32.
LEAST = 2.0**-100


def rounded(x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n inputs"]:
    """Return what rounded rows stand for, in float32. This is the definition."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # A quotient of a plain number is rounded twice.
    inverse = torch.where(largest > LEAST, torch.full_like(largest, LARGEST) / largest, 0.0)
    found: Tensor = ((blocks * inverse).round() * (largest * (1 / LARGEST))).flatten(-2)
    return found
