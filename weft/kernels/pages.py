"""Pages of fewer bits than the model computes with: a code of eight bits for each number, and a power of two for each
token and head.

A key is rounded when it is written, and everything that attends reads it from its page, the step that wrote it
included: so a cache hit reads what a cold run has read. Codes are e4m3 or integers, as the dtype of the pages says.
Both have at most eight significant bits, so what is read is exact in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from weft.device.store import AttentionView

# The largest code.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
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
            codes, exponents[index] = encoded(new, numbers.dtype)
            # Not every device writes numbers of eight bits with an exponent to an index.
            numbers.view(torch.uint8)[index] = codes.view(torch.uint8)


def take(view: AttentionView, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values of these pages, [pages, cell, heads, head_dim]."""
    return (
        taken(view.keys, view.key_exponents, index, dtype),
        taken(view.values, view.value_exponents, index, dtype),
    )


def taken(numbers: Tensor, exponents: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    if exponents is None:
        return numbers.index_select(0, index).to(dtype)
    codes = numbers.view(torch.uint8).index_select(0, index).view(numbers.dtype)
    return decoded(codes, exponents.index_select(0, index), dtype)


def encoded(
    numbers: Float[Tensor, "*any size"], kind: torch.dtype
) -> tuple[Shaped[Tensor, "*any size"], UInt8[Tensor, "*any"]]:
    """Return codes of this kind, the largest of which is in the upper half of the range, and exponents.

    >>> codes, exponent = encoded(torch.tensor([0.1, -3.0, 1000.0]), torch.float8_e4m3fn)
    >>> int(exponent) - BIAS, decoded(codes, exponent, torch.float32).tolist()
    (2, [0.1015625, -3.0, 1024.0])
    >>> encoded(torch.tensor([0.1, -3.0, 10.0]), torch.int8)[0].tolist()
    [1, -24, 80]
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    mantissas, exponents = torch.frexp(largest / LARGEST[kind])
    # The least power of two times which the largest code is not less.
    powers = (exponents - (mantissas == 0.5).int()).clamp(1 - BIAS, BIAS - 1)
    scaled = torch.ldexp(wide, -powers.unsqueeze(-1))
    # What is no number has any code: its head's power is infinite.
    codes = (scaled if kind.is_floating_point else scaled.nan_to_num(LARGEST[kind]).clamp(-127, 127).round()).to(kind)
    return codes, torch.where(largest.isfinite(), powers + BIAS, BROKEN).to(torch.uint8)


def decoded(
    codes: Shaped[Tensor, "*any size"], exponents: UInt8[Tensor, "*any"], dtype: torch.dtype
) -> Float[Tensor, "*any size"]:
    powers = (exponents.int() << 23).view(torch.float32)
    found: Tensor = (codes.float() * powers.unsqueeze(-1)).to(dtype)
    return found
