"""Common parts of the sampling kernels: chunks of a row, and weights that add up exactly.

A row is cut into chunks, one program each. Weights are integers, exp(x) * 2**40, so their sums are exact: neither
the order of additions nor other rows can change a row's sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a program that adds up weights.
CHUNK = tl.constexpr(4096)
# The weight of the most likely token, which stands for 1. With 2**18 tokens sums stay below 2**63.
UNIT = tl.constexpr(float(2**40))


@triton.jit
def scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """Return (logit - maximum) / temperature of a chunk: 0 for the most likely token, minus infinity beyond the end."""
    below, heat = chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    return tl.div_rn(below, heat)


@triton.jit
def chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """Return the distances of a chunk's logits from the row's maximum, and the temperature."""
    place = tl.arange(0, BLOCK)
    top = tl.max(tl.load(greatest + row * chunks + place, mask=place < chunks, other=float("-inf")), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return value - top, tl.load(temperature + row)


@triton.jit
def weight(scaled):
    return (tl.exp(scaled) * UNIT).to(tl.int64)
