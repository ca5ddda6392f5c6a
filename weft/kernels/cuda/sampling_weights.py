"""What the kernels that draw tokens have in common: chunks of a row, and weights that add up exactly.

A row is cut into chunks, one program each. Weights are whole numbers, exp(x) * 2**40, so their sums are exact: no order
of additions and no company of other rows can change what a row draws.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a program that adds up weights.
CHUNK = tl.constexpr(4096)
# A weight of 1, that of the likeliest token. With 2**18 tokens sums stay below 2**63.
UNIT = tl.constexpr(float(2**40))


@triton.jit
def scaled_chunk(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """(logit - greatest) / temperature of a chunk: the likeliest token has 0. Beyond the end: minus infinity."""
    below, heat = chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK)
    return tl.div_rn(below, heat)


@triton.jit
def chunk_below(logits, greatest, temperature, row, chunk, chunks, stride, vocab, BLOCK: tl.constexpr):
    """How far the logits of a chunk are from the row's greatest, and the temperature."""
    place = tl.arange(0, BLOCK)
    top = tl.max(tl.load(greatest + row * chunks + place, mask=place < chunks, other=float("-inf")), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return value - top, tl.load(temperature + row)


@triton.jit
def weight(scaled):
    return (tl.exp(scaled) * UNIT).to(tl.int64)
