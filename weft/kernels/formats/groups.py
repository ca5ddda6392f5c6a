"""Integers of four or eight bits in groups: each group of adjacent inputs of an output has a scale, and maybe a zero.

GPTQ, AWQ, AutoRound and compressed-tensors all mean this and pack it differently: `integers.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.kernels.formats.stored import DENSE, Format, Stored
from weft.kernels.formats.written import Stating, WrittenFormat, by_channel, stated

# Inputs of a group, where nothing states it, and the fewest after a cut: below it, scales outweigh codes.
GROUP, LEAST_GROUP = 128, 16
SCALES, SCALE_BYTES = torch.bfloat16, 2
# Numbers that are quantised at a time.
ENCODED_AT_ONCE = 1 << 22
# Groups that other tools read, which must divide the inputs; and the bytes of their words.
WRITTEN_GROUPS, WORD_BYTES = (128, 64, 32), 4
# Ranges that are tried for a group, as shares of the one that cuts nothing off.
CLIPPINGS = tuple(1 - 0.05 * step for step in range(8))


@dataclass(frozen=True, slots=True)
class Grouped(WrittenFormat):
    """Integers without sign in groups of `group` inputs; the last group may be shorter.

    Tensors: codes [outputs, bytes], of four bits the first of a pair in the low half; scales [outputs, groups]; and if
    `has_zeros`, zeros [outputs, groups] in bytes. A number is (code - zero) * scale; without zeros, the zero is half of
    the range.
    """

    bits: int
    group: int
    has_zeros: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        assert self.bits in (4, 8)
        object.__setattr__(self, "name", f"int{self.bits} 1")

    @property
    def middle(self) -> int:
        """Return the code of zero where no zeros are stored."""
        return 1 << (self.bits - 1)

    def of(self, tensors: tuple[Tensor, ...], inputs: int) -> Stored:
        """Return the matrix of these tensors. A group that holds all inputs has their size."""
        return Stored(replace(self, group=min(self.group, inputs)), tensors, tensors[0].shape[-2], inputs)

    def codes_of(self, stored: Stored) -> UInt8[Tensor, "*experts outputs inputs"]:
        """Return a code for each number."""
        codes = stored.tensors[0]
        return halves(codes)[..., : stored.inputs] if self.bits == 4 else codes

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        codes, scales = self.codes_of(stored).float(), self._spread(stored, stored.tensors[1].float())
        zeros = self._spread(stored, stored.tensors[2].float()) if self.has_zeros else float(self.middle)
        return (codes - zeros) * scales

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        return self.of(tuple(each.index_select(-2, index) for each in stored.tensors), stored.inputs)

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        return self.of(tuple(each[..., start:end, :] for each in stored.tensors), stored.inputs)

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        whole = self.group == stored.inputs
        size = self.group if whole else math.gcd(self.group, start, *(() if end == stored.inputs else (end,)))
        if (self.bits == 4 and start % 2) or (not whole and size < min(LEAST_GROUP, self.group)):
            return None
        codes, *others = (stored if whole else self._refined(stored, size)).tensors
        first, last = (start, end) if self.bits == 8 else (start // 2, -(-end // 2))
        if not whole:
            others = [each[..., start // size : -(-end // size)] for each in others]
        return replace(self, group=size).of((codes[..., first:last], *others), end - start)

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        group = self._common_group(parts, ())
        if group is None:
            return None
        pieces = [_format_of(part)._refined(part, group).tensors for part in parts]
        return replace(self, group=group).of(tuple(torch.cat(each, -2) for each in zip(*pieces)), parts[0].inputs)

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        before = [part.inputs for part in parts[:-1]]
        group = self._common_group(parts, before)
        if group is None or any(inputs % 2 for inputs in before):
            return None
        pieces = [_format_of(part)._refined(part, group).tensors for part in parts]
        tensors = tuple(torch.cat(each, -1) for each in zip(*pieces))
        return replace(self, group=group).of(tensors, sum(part.inputs for part in parts))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored:
        codes, scales, *zeros = stored.tensors
        factors = factor.view(-1, 1) if isinstance(factor, Tensor) else factor
        return replace(stored, tensors=(codes, scales.float() * factors, *zeros))

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers rounded to the nearest code, each group cut off where its squared error is least."""
        *experts, outputs, inputs = matrix.shape
        own, rows = replace(self, group=min(self.group, inputs)), matrix.reshape(-1, inputs)
        step = max(1, ENCODED_AT_ONCE // inputs)
        pieces = [own._encoded(rows[first : first + step].float()) for first in range(0, len(rows), step)]
        tensors = (torch.cat(each).view(*experts, outputs, -1) for each in zip(*pieces))
        return own.of(tuple(tensors), inputs)

    def bytes_of(self, outputs: int, inputs: int) -> int:
        of_group = SCALE_BYTES + self.has_zeros
        return outputs * (-(-inputs * self.bits // 8) + of_group * -(-inputs // min(self.group, inputs)))

    def for_others(self, outputs: int, inputs: int) -> Format:
        if inputs * self.bits // 8 % WORD_BYTES:
            return DENSE
        if self.group == inputs or inputs % self.group == 0:
            return self
        return replace(self, group=next((size for size in WRITTEN_GROUPS if inputs % size == 0), inputs))

    def spelled(self, stored: Stored) -> dict[str, Tensor]:
        codes, scales = stored.tensors
        shape = torch.tensor([stored.outputs, stored.inputs])
        return {"weight_packed": codes.contiguous().view(torch.int32), "weight_scale": scales, "weight_shape": shape}

    def stating(self) -> Stating:
        if self.group not in WRITTEN_GROUPS:
            return by_channel("pack-quantized", "int", self.bits)
        return stated("pack-quantized", "int", self.bits, "group", group_size=self.group)

    def _encoded(self, matrix: Float[Tensor, "rows inputs"]) -> tuple[Tensor, ...]:
        inputs, top = matrix.shape[-1], 2 * self.middle - 1
        groups = F.pad(matrix, (0, -inputs % self.group)).unflatten(-1, (-1, self.group))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        if not self.has_zeros:
            high = torch.maximum(high, -low)
            low = -high
        best: tuple[Tensor, ...] | None = None
        for clipping in CLIPPINGS:
            scale = ((high - low) * (clipping / top)).to(SCALES)
            wide = torch.where(scale > 0, scale.float(), 1.0)
            zero = (-low * clipping / wide).round() if self.has_zeros else torch.full_like(wide, self.middle)
            codes = ((groups / wide.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, top)
            error = ((codes - zero.unsqueeze(-1)) * wide.unsqueeze(-1) - groups).square().sum(-1)
            found = (error, codes.to(torch.uint8), wide.to(SCALES), zero.to(torch.uint8))
            better = None if best is None else error < best[0]
            best = found if best is None else _chosen(better, found, best)
        assert best is not None
        _, codes, scales, zeros = best
        flat = codes.flatten(-2)[..., :inputs]
        return (paired(flat) if self.bits == 4 else flat, scales, *((zeros,) if self.has_zeros else ()))

    def _common_group(self, parts: Sequence[Stored], edges: Sequence[int]) -> int | None:
        """Return the size of groups that all parts can have, and that end at these inputs."""
        formats = [_format_of(part) for part in parts]
        group = math.gcd(*(each.group for each in formats), *edges)
        alike = all((each.bits, each.has_zeros) == (self.bits, self.has_zeros) for each in formats)
        return group if alike and group >= min(LEAST_GROUP, *(each.group for each in formats)) else None

    def _refined(self, stored: Stored, group: int) -> Stored:
        """Return a matrix with smaller groups, whose size divides that of its own."""
        if group == self.group:
            return stored
        codes, *others = stored.tensors
        count = -(-stored.inputs // group)
        finer = [each.repeat_interleave(self.group // group, -1)[..., :count] for each in others]
        return replace(stored, format=replace(self, group=group), tensors=(codes, *finer))

    def _spread(self, stored: Stored, of_groups: Tensor) -> Float[Tensor, "*experts outputs inputs"]:
        return of_groups.repeat_interleave(self.group, -1)[..., : stored.inputs]


def _format_of(stored: Stored) -> Grouped:
    assert isinstance(stored.format, Grouped)
    return stored.format


def _chosen(better: Tensor | None, one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, ...]:
    assert better is not None
    return tuple(
        torch.where(better if a.ndim == better.ndim else better.unsqueeze(-1), a, b) for a, b in zip(one, other)
    )


def halves(codes: UInt8[Tensor, "*any bytes"]) -> UInt8[Tensor, "*any codes"]:
    """Return both halves of all bytes, the low one first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def paired(codes: UInt8[Tensor, "*any codes"]) -> UInt8[Tensor, "*any bytes"]:
    """Return codes of four bits two in a byte, the first in the low half."""
    pairs: Tensor = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)
