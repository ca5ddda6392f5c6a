"""MXFP4: blocks of 32 four-bit floats with a shared power of two, two floats per byte. Decoded at load."""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, UInt8
from torch import Tensor

# Sign, two bits of exponent, one of mantissa; the sign is the highest bit.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127


def decode(
    blocks: UInt8[Tensor, "*outer groups half"], scales: UInt8[Tensor, "*outer groups"]
) -> BFloat16[Tensor, "*outer inputs"]:
    """Return the floats. The first of a pair is in the low half of its byte. Every result is exact in bfloat16."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16)
    decoded = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    # One slice at a time: the index arrays are eight times as large as the decoded values.
    for out, packed, scale in zip(decoded, blocks, scales):
        exponent = (scale.int() - EXPONENT_BIAS).unsqueeze(-1)
        for half, four_bits in enumerate((packed & 0x0F, packed >> 4)):
            out[..., half] = torch.ldexp(values[four_bits.int()], exponent)
    return decoded.flatten(-3)
