"""The types of blocks in GGUF files: bytes of a block, and what they mean.

`unpack` functions are the definition. They take blocks in the last dimension and compute in float32 what the public
tools compute, in the same order. Half-precision scales are little-endian. Codebook types (IQ1, IQ2, IQ3) are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.formats.block_writers import pack_q4_0, pack_q4_k, pack_q5_k, pack_q6_k, pack_q8_0
from weft.kernels.formats.blocks import BlockFormat, OtherInputs
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Stored

Bytes = UInt8[Tensor, "*blocks bytes"]
Numbers = Float[Tensor, "*blocks numbers"]

# What the codes of IQ4_NL and IQ4_XS mean.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the four-bit floats of MXFP4 and NVFP4; their scales are half as large.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _looked_up(values: tuple[int, ...], codes: Int[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return _table(values, codes.device)[codes.int()]


def _half(block: Bytes, place: int) -> Float[Tensor, "*blocks 1"]:
    """Return the 16-bit float at a place of every block."""
    return block[..., place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: UInt8[Tensor, "*any n"]) -> UInt8[Tensor, "*any twice"]:
    """Return the low halves of all bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _bits(codes: UInt8[Tensor, "*any n"], width: int, shifts: range) -> UInt8[Tensor, "*any shifts n"]:
    """Return what each byte holds at each of these shifts."""
    return torch.stack([(codes >> shift) & ((1 << width) - 1) for shift in shifts], -2)


def _in_runs(scales: Float[Tensor, "*blocks runs"], numbers: Float[Tensor, "*blocks numbers"]) -> Numbers:
    """Return numbers times the scale of their run."""
    runs: Tensor = numbers.unflatten(-1, (scales.shape[-1], -1))
    return (scales.unsqueeze(-1) * runs).flatten(-2)


def _fifth_bits(block: Bytes, place: int) -> UInt8[Tensor, "*blocks 32"]:
    """Return the highest bits of 32 codes, moved to where they belong."""
    return _bits(block[..., place : place + 4], 1, range(8)).transpose(-1, -2).flatten(-2) << 4


# Blocks of 32 ---------------------------------------------------------------------------------------------------------


def unpack_q4_0(block: Bytes) -> Numbers:
    return _half(block, 0) * (_nibbles(block[..., 2:]).float() - 8)


def unpack_q4_1(block: Bytes) -> Numbers:
    return _half(block, 0) * _nibbles(block[..., 4:]).float() + _half(block, 2)


def unpack_q5_0(block: Bytes) -> Numbers:
    return _half(block, 0) * ((_nibbles(block[..., 6:]) | _fifth_bits(block, 2)).float() - 16)


def unpack_q5_1(block: Bytes) -> Numbers:
    return _half(block, 0) * (_nibbles(block[..., 8:]) | _fifth_bits(block, 4)).float() + _half(block, 2)


def unpack_q8_0(block: Bytes) -> Numbers:
    return _half(block, 0) * block[..., 2:].view(torch.int8).float()


def unpack_iq4_nl(block: Bytes) -> Numbers:
    return _half(block, 0) * _looked_up(UNEVEN, _nibbles(block[..., 2:]))


def unpack_mxfp4(block: Bytes) -> Numbers:
    exponent = block[..., :1].int()
    # Half of the power of two; the least two have no exponent of their own.
    scale = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    return scale * _looked_up(DOUBLED, _nibbles(block[..., 1:]))


def unpack_nvfp4(block: Bytes) -> Numbers:
    """Four runs of 16 numbers, each with an unsigned e4m3 scale."""
    codes = block[..., :4].int()
    exponent, last = (codes >> 3) & 15, (codes & 7).float()
    scale = torch.where(exponent == 0, last * 2.0**-9, torch.ldexp(1 + last / 8, exponent - 7))
    # The code without a number counts as zero, as in the public tools.
    scale = torch.where((codes == 0) | (codes == 0x7F), 0.0, scale) * 0.5
    return _in_runs(scale, _looked_up(DOUBLED, _nibbles(block[..., 4:].unflatten(-1, (4, 8)))).flatten(-2))


# Blocks of 256 --------------------------------------------------------------------------------------------------------


def unpack_q2_k(block: Bytes) -> Numbers:
    """Sixteen runs of 16, each with a scale and a minimum of four bits."""
    scales = _half(block, 80) * (block[..., :16] & 15).float()
    least = _half(block, 82) * (block[..., :16] >> 4).float()
    codes = _bits(block[..., 16:80].unflatten(-1, (2, 32)), 2, range(0, 8, 2)).flatten(-3)
    return _in_runs(scales, codes.float()) - least.repeat_interleave(16, -1)


def unpack_q3_k(block: Bytes) -> Numbers:
    """Sixteen runs of 16, each with a scale of six bits with a sign."""
    packed = block[..., 96:108]
    high = _bits(packed[..., 8:], 2, range(0, 8, 2)).flatten(-2)
    scales = _half(block, 108) * ((_nibbles(packed[..., :8]) | (high << 4)).float() - 32)
    codes = _bits(block[..., 32:96].unflatten(-1, (2, 32)), 2, range(0, 8, 2)).flatten(-3)
    third = _bits(block[..., :32], 1, range(8)).flatten(-2)
    numbers = (codes | (third << 2)).float() - 4
    return _in_runs(scales, numbers)


def six_bit_scales(packed: UInt8[Tensor, "*blocks 12"]) -> tuple[Tensor, Tensor]:
    """Return the eight scales and eight minima of Q4_K and Q5_K."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    return scales, least


def _with_scales_and_minima(block: Bytes, codes: UInt8[Tensor, "*blocks 8 32"]) -> Numbers:
    scales, least = six_bit_scales(block[..., 4:16])
    factors, shifts = _half(block, 0) * scales.float(), _half(block, 2) * least.float()
    return (factors.unsqueeze(-1) * codes.float() - shifts.unsqueeze(-1)).flatten(-2)


def _eight_runs(codes: UInt8[Tensor, "*blocks 128"]) -> UInt8[Tensor, "*blocks 8 32"]:
    found: Tensor = _nibbles(codes.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return found


def unpack_q4_k(block: Bytes) -> Numbers:
    return _with_scales_and_minima(block, _eight_runs(block[..., 16:]))


def unpack_q5_k(block: Bytes) -> Numbers:
    return _with_scales_and_minima(block, _eight_runs(block[..., 48:]) | (_bits(block[..., 16:48], 1, range(8)) << 4))


def unpack_q6_k(block: Bytes) -> Numbers:
    """Sixteen runs of 16, each with a scale of eight bits."""
    low = block[..., :128].unflatten(-1, (2, 64))
    high = _bits(block[..., 128:192].unflatten(-1, (2, 32)), 2, range(0, 8, 2)).flatten(-2)
    numbers = (_nibbles(low) | (high << 4)).flatten(-2).float() - 32
    scales = _half(block, 208) * block[..., 192:208].view(torch.int8).float()
    return _in_runs(scales, numbers)


def unpack_iq4_xs(block: Bytes) -> Numbers:
    """Eight runs of 32, each with a scale of six bits."""
    low = torch.stack((block[..., 4:8] & 15, block[..., 4:8] >> 4), -1).flatten(-2)
    high = _bits(block[..., 2:4], 2, range(0, 8, 2)).transpose(-1, -2).flatten(-2)
    scales = _half(block, 0) * ((low | (high << 4)).float() - 32)
    return _in_runs(scales, _looked_up(UNEVEN, _nibbles(block[..., 8:].unflatten(-1, (8, 16)))).flatten(-2))


Q4_0 = BlockFormat("q4_0 1", 32, 18, unpack_q4_0, pack_q4_0)
Q4_1 = BlockFormat("q4_1 1", 32, 20, unpack_q4_1)
Q5_0 = BlockFormat("q5_0 1", 32, 22, unpack_q5_0)
Q5_1 = BlockFormat("q5_1 1", 32, 24, unpack_q5_1)
Q8_0 = BlockFormat("q8_0 1", 32, 34, unpack_q8_0, pack_q8_0)
Q2_K = BlockFormat("q2_k 1", 256, 84, unpack_q2_k)
Q3_K = BlockFormat("q3_k 1", 256, 110, unpack_q3_k)
Q4_K = BlockFormat("q4_k 1", 256, 144, unpack_q4_k, pack_q4_k)
Q5_K = BlockFormat("q5_k 1", 256, 176, unpack_q5_k, pack_q5_k)
Q6_K = BlockFormat("q6_k 1", 256, 210, unpack_q6_k, pack_q6_k)
IQ4_NL = BlockFormat("iq4_nl 1", 32, 18, unpack_iq4_nl)
IQ4_XS = BlockFormat("iq4_xs 1", 256, 136, unpack_iq4_xs)
MXFP4 = BlockFormat("mxfp4 blocks 1", 32, 17, unpack_mxfp4)
NVFP4 = BlockFormat("nvfp4 blocks 1", 64, 36, unpack_nvfp4)

# By the names that GGUF gives its types.
BLOCK_TYPES = {
    "Q4_0": Q4_0, "Q4_1": Q4_1, "Q5_0": Q5_0, "Q5_1": Q5_1, "Q8_0": Q8_0, "Q2_K": Q2_K, "Q3_K": Q3_K, "Q4_K": Q4_K,
    "Q5_K": Q5_K, "Q6_K": Q6_K, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_XS, "MXFP4": MXFP4, "NVFP4": NVFP4,
}  # fmt: skip


# How files spell it ---------------------------------------------------------------------------------------------------


def _spelling(kind: str, format: BlockFormat) -> Spelling:
    """Return how a tensor of a GGUF file is a matrix. The file itself states its type."""

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
        [shape] = shapes
        return shape if len(shape) > 1 else f"{kind} has shape {list(shape)}, which is no matrix"

    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        return format.of(tensors[0])

    return Spelling(kind.lower(), ("",), ((kind,),), sizes, read, is_stated=False)


def _with_order(plain: Spelling) -> Spelling:
    """Return how a matrix is spelled whose inputs are stored in another order, which stands beside it."""

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
        return plain.sizes(shapes[:1], scheme)

    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        return OtherInputs.of(plain.read(tensors[:1], scheme), tensors[1])

    return Spelling(plain.kind, ("", "_order"), (*plain.dtypes, ("I64",)), sizes, read, is_stated=False)


_PLAIN = tuple(_spelling(kind, format) for kind, format in BLOCK_TYPES.items())
# Those with more tensors first: the first whose tensors are all there counts.
SPELLINGS = (*map(_with_order, _PLAIN), *_PLAIN)


def claim(statement: Statement) -> Scheme | None:
    """Return None: no configuration states blocks of GGUF."""
    return None


def of(scheme: Scheme, outputs: int, inputs: int) -> BlockFormat | None:
    """Return the format of a matrix of this size."""
    found = BLOCK_TYPES.get(scheme.kind.upper())
    return found if found is not None and inputs % found.numbers == 0 else None
