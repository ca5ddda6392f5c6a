"""Numbers as blocks of GGUF files: the inverse of `block_types.py`, for the types that Weft writes.

Types of 32 numbers are rounded as the public tools round them, to the bit. In types of 256, a run's scale is the one of
several that loses least; the public tools search too, but in other steps, so their blocks differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

Bytes = UInt8[Tensor, "*blocks bytes"]
Numbers = Float[Tensor, "*blocks numbers"]

# Scales that are tried for a run, as shares of the one that its largest number asks for.
TRIED = (1.0, 0.96, 0.92, 0.88, 0.84, 1.04)
# Blocks that are searched at a time, so that they stay in the cache.
TOGETHER = 1 << 12
# Smaller sums of squares count as zero.
LEAST = 1e-30


def _half_bytes(values: Float[Tensor, "*blocks n"]) -> UInt8[Tensor, "*blocks 2n"]:
    found: Tensor = values.half().contiguous().view(torch.uint8)
    return found


def _inverse(values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return torch.where(values == 0, 0.0, 1 / values)


def _pairs(codes: Int[Tensor, "*any n"]) -> UInt8[Tensor, "*any half"]:
    """Return codes of four bits, the first half of them in the low bits of bytes."""
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def _in_pieces(numbers: Numbers, pack_some: Callable[[Tensor], Tensor]) -> Bytes:
    flat = numbers.reshape(-1, numbers.shape[-1])
    found = torch.cat([pack_some(some) for some in flat.split(TOGETHER)])
    return found.view(*numbers.shape[:-1], -1)


def pack_q8_0(numbers: Numbers) -> Bytes:
    scale = numbers.abs().amax(-1, keepdim=True) / 127
    exact = numbers * _inverse(scale)
    # Halves are rounded away from zero.
    codes = (exact.abs() + 0.5).floor() * exact.sign()
    return torch.cat((_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)), -1)


def pack_q4_0(numbers: Numbers) -> Bytes:
    largest = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (numbers * _inverse(scale) + 8.5).floor().clamp(0, 15)
    return torch.cat((_half_bytes(scale), _pairs(codes)), -1)


# Blocks of 256 --------------------------------------------------------------------------------------------------------


def _searched(runs: Float[Tensor, "blocks runs n"], top: int) -> tuple[Tensor, Tensor]:
    """Return for each run the scale and the offset below zero with which codes of 0 to `top` lose least."""
    least = runs.amin(-1, keepdim=True).clamp(max=0)
    span = (runs.amax(-1, keepdim=True) - least) / top
    best_scale, best_least, best_loss = span, least, torch.full_like(span, torch.inf)
    for share in TRIED:
        codes = ((runs - least) * _inverse(span * share)).round().clamp(0, top)
        # The straight line through numbers by codes that loses least.
        mean_code, mean = codes.mean(-1, keepdim=True), runs.mean(-1, keepdim=True)
        spread = (codes - mean_code).square().sum(-1, keepdim=True)
        slope = ((codes - mean_code) * (runs - mean)).sum(-1, keepdim=True) / spread.clamp(min=LEAST)
        offset = mean - slope * mean_code
        # Offsets above zero cannot be stored.
        alone = (codes * runs).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True).clamp(min=LEAST)
        slope, offset = torch.where(offset > 0, alone, slope), offset.clamp(max=0)
        loss = (slope * codes + offset - runs).square().sum(-1, keepdim=True)
        is_better = (loss < best_loss) & (slope > 0)
        best_scale = torch.where(is_better, slope, best_scale)
        best_least = torch.where(is_better, offset, best_least)
        best_loss = torch.where(is_better, loss, best_loss)
    return best_scale, -best_least


def six_bits_packed(scales: Int[Tensor, "blocks 8"], least: Int[Tensor, "blocks 8"]) -> UInt8[Tensor, "blocks 12"]:
    """Return eight scales and eight minima of six bits in twelve bytes."""
    scales, least = scales.to(torch.uint8), least.to(torch.uint8)
    first = scales[..., :4] | (scales[..., 4:] >> 4 << 6)
    second = least[..., :4] | (least[..., 4:] >> 4 << 6)
    return torch.cat((first, second, (scales[..., 4:] & 15) | ((least[..., 4:] & 15) << 4)), -1)


def _with_scales_and_minima(numbers: Float[Tensor, "blocks 256"], top: int) -> tuple[Tensor, Tensor]:
    """Return the first sixteen bytes of blocks of Q4_K and Q5_K, and their codes [blocks, 8, 32]."""
    runs = numbers.unflatten(-1, (8, 32))
    scale, offset = (each.squeeze(-1) for each in _searched(runs, top))
    # What is stored is rounded, so that codes are chosen for the numbers that a reader will have.
    shared = [(each.amax(-1, keepdim=True) / 63).half().float() for each in (scale, offset)]
    parts = [(each * _inverse(one)).round().clamp(0, 63) for each, one in zip((scale, offset), shared)]
    found, least = ((one * part).unsqueeze(-1) for one, part in zip(shared, parts))
    codes = ((runs + least) * _inverse(found)).round().clamp(0, top).to(torch.uint8)
    return torch.cat((*map(_half_bytes, shared), six_bits_packed(*parts)), -1), codes


def _nibbles_of_runs(codes: UInt8[Tensor, "blocks 8 32"]) -> UInt8[Tensor, "blocks 128"]:
    both = codes.unflatten(-2, (4, 2)) & 15
    found: Tensor = (both[..., 0, :] | (both[..., 1, :] << 4)).flatten(-2)
    return found


def pack_q4_k(numbers: Numbers) -> Bytes:
    def some(blocks: Tensor) -> Tensor:
        head, codes = _with_scales_and_minima(blocks, 15)
        return torch.cat((head, _nibbles_of_runs(codes)), -1)

    return _in_pieces(numbers, some)


def pack_q5_k(numbers: Numbers) -> Bytes:
    def some(blocks: Tensor) -> Tensor:
        head, codes = _with_scales_and_minima(blocks, 31)
        fifth = sum((codes[..., run, :] >> 4 << run for run in range(1, 8)), codes[..., 0, :] >> 4)
        assert isinstance(fifth, Tensor)
        return torch.cat((head, fifth, _nibbles_of_runs(codes)), -1)

    return _in_pieces(numbers, some)


def pack_q6_k(numbers: Numbers) -> Bytes:
    def some(blocks: Tensor) -> Tensor:
        runs = blocks.unflatten(-1, (16, 16))
        scale = _signed_scales(runs, 32)
        shared = (scale.gather(-1, scale.abs().argmax(-1, keepdim=True)) / -128).half().float()
        own = (scale * _inverse(shared)).round().clamp(-128, 127)
        codes = (runs * _inverse((shared * own).unsqueeze(-1))).round().clamp(-32, 31) + 32
        # [halves, quarters, 32]: low bits of two quarters share bytes, high bits of four do.
        quarters = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
        low = (quarters[..., :2, :] & 15) | ((quarters[..., 2:, :] & 15) << 4)
        high = quarters >> 4
        above = high[..., 0, :] | (high[..., 1, :] << 2) | (high[..., 2, :] << 4) | (high[..., 3, :] << 6)
        bytes_ = (low.flatten(-3), above.flatten(-2), own.to(torch.int8).view(torch.uint8), _half_bytes(shared))
        return torch.cat(bytes_, -1)

    return _in_pieces(numbers, some)


def _signed_scales(runs: Float[Tensor, "blocks runs n"], top: int) -> Float[Tensor, "blocks runs"]:
    """Return for each run the scale with which codes of -top to top - 1 lose least."""
    largest = runs.gather(-1, runs.abs().argmax(-1, keepdim=True))
    best, best_gain = torch.zeros_like(largest), torch.zeros_like(largest)
    for share in TRIED:
        codes = (runs * _inverse(largest * share / -top)).round().clamp(-top, top - 1)
        product, square = (codes * runs).sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True).clamp(min=LEAST)
        gain = product.square() / square
        best = torch.where(gain > best_gain, product / square, best)
        best_gain = torch.maximum(gain, best_gain)
    return best.squeeze(-1)
