"""Pages of fewer bits than the model computes with: e4m3, and a power of two for each token and head.

A key is rounded when it is written, and everything that attends reads it from its page, the step that wrote it
included: so a cache hit reads what a cold run has read. What is read is exact in bfloat16, since e4m3 has four
significant bits.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from weft.device.store import AttentionView

CODES, LARGEST = torch.float8_e4m3fn, 448.0
# A power of two is stored as its exponent plus this. That of a head with infinities or what is no number is infinite.
BIAS = 127
BROKEN = 2 * BIAS + 1


def put(view: AttentionView, index: Any, keys: Tensor, values: Tensor) -> None:
    """Write keys and values to the places in pages that `index` names."""
    parts = ((view.keys, view.key_exponents, keys), (view.values, view.value_exponents, values))
    for numbers, exponents, new in parts:
        if exponents is None:
            numbers[index] = new
        else:
            # Not every device writes numbers of eight bits with an exponent to an index.
            numbers.view(torch.uint8)[index], exponents[index] = encoded(new)


def take(view: AttentionView, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values of these pages, [pages, cell, heads, head_dim]."""
    return (
        taken(view.keys, view.key_exponents, index, dtype),
        taken(view.values, view.value_exponents, index, dtype),
    )


def taken(numbers: Tensor, exponents: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    if exponents is None:
        return numbers.index_select(0, index).to(dtype)
    codes = numbers.view(torch.uint8).index_select(0, index)
    return decoded(codes, exponents.index_select(0, index), dtype)


def encoded(numbers: Float[Tensor, "*any size"]) -> tuple[UInt8[Tensor, "*any size"], UInt8[Tensor, "*any"]]:
    """Return codes, whose largest uses the upper half of the range, and exponents.

    >>> codes, exponent = encoded(torch.tensor([0.1, -3.0, 1000.0]))
    >>> int(exponent) - BIAS, decoded(codes, exponent, torch.float32).tolist()
    (2, [0.1015625, -3.0, 1024.0])
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    mantissas, exponents = torch.frexp(largest / LARGEST)
    # The least power of two times which the largest code is not less.
    powers = (exponents - (mantissas == 0.5).int()).clamp(1 - BIAS, BIAS - 1)
    codes = torch.ldexp(wide, -powers.unsqueeze(-1)).to(CODES)
    return codes.view(torch.uint8), torch.where(largest.isfinite(), powers + BIAS, BROKEN).to(torch.uint8)


def decoded(
    codes: UInt8[Tensor, "*any size"], exponents: UInt8[Tensor, "*any"], dtype: torch.dtype
) -> Float[Tensor, "*any size"]:
    powers = (exponents.int() << 23).view(torch.float32)
    found: Tensor = (codes.view(CODES).float() * powers.unsqueeze(-1)).to(dtype)
    return found
