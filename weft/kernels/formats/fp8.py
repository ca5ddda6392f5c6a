"""FP8 (e4m3): a byte for each number, and a float32 scale for each block of outputs and inputs.

Checkpoints have blocks of 128 x 128, one scale for each output, or one for the whole matrix. A cut or another order
that blocks do not allow makes them smaller: their scales are repeated, the bytes stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Stored
from weft.kernels.formats.written import Stating, WrittenFormat, by_channel, stated

CODES = torch.float8_e4m3fn
LARGEST = 448.0
SCALE_BYTES = 4
# Fewest numbers of a block: below it, scales would be a large part of the matrix.
LEAST_BLOCK = 64
# Outputs and inputs of a block, where no configuration states it.
BLOCK = 128
# Numbers that are quantised at a time, besides those of a single row of blocks.
ENCODED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Fp8(WrittenFormat):
    """FP8 with a scale for each block of `block_rows` outputs and `block_columns` inputs.

    Tensors: codes [outputs, inputs] and scales [blocks of outputs, blocks of inputs], which multiply. The last blocks
    may be smaller.
    """

    block_rows: int
    block_columns: int
    name: str = "fp8 1"

    def decode(self, stored: Stored) -> Float[Tensor, "*experts outputs inputs"]:
        codes, scales = stored.tensors
        by_row = scales.repeat_interleave(self.block_rows, -2)[..., : stored.outputs, :]
        return codes.float() * by_row.repeat_interleave(self.block_columns, -1)[..., : stored.inputs]

    def rows(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        codes, scales = stored.tensors
        # Not every device gathers numbers of eight bits with an exponent.
        chosen = codes.view(torch.uint8).index_select(-2, index).view(CODES)
        own = scales.index_select(-2, index // self.block_rows)
        return Stored(replace(self, block_rows=1), (chosen, own), len(index), stored.inputs)

    def reordered(self, stored: Stored, index: Int[Tensor, " rows"]) -> Stored:
        found, source = self.rows(stored, index), index // self.block_rows
        size = next(size for size in range(self.block_rows, 0, -1) if _is_alike(source, size))
        codes, scales = found.tensors
        return replace(found, format=replace(self, block_rows=size), tensors=(codes, scales[..., ::size, :]))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored:
        size = math.gcd(self.block_rows, start)
        codes, scales = self._refined(stored, size, self.block_columns).tensors
        own = scales[..., start // size : -(-end // size), :]
        return Stored(replace(self, block_rows=size), (codes[..., start:end, :], own), end - start, stored.inputs)

    def cut_columns(self, stored: Stored, start: int, end: int) -> Stored | None:
        # The whole of an output is one block whatever its size.
        size = math.gcd(self.block_columns, start, *(() if end == stored.inputs else (end,)))
        if self.block_columns == stored.inputs:
            size = end - start
            own = stored.tensors[1]
        elif size < min(LEAST_BLOCK, self.block_columns):
            return None
        else:
            own = self._refined(stored, self.block_rows, size).tensors[1][..., start // size : -(-end // size)]
        codes = stored.tensors[0][..., start:end]
        return Stored(replace(self, block_columns=size), (codes, own), stored.outputs, end - start)

    def stacked(self, parts: Sequence[Stored]) -> Stored | None:
        formats = [_format_of(part) for part in parts]
        columns = formats[0].block_columns
        rows = math.gcd(*(each.block_rows for each in formats), *(part.outputs for part in parts[:-1]))
        least = min(LEAST_BLOCK, *(each.block_rows * each.block_columns for each in formats))
        if any(each.block_columns != columns for each in formats) or rows * columns < least:
            return None
        pieces = [own._refined(part, rows, columns).tensors for own, part in zip(formats, parts)]
        tensors = tuple(joined([piece[k] for piece in pieces], -2) for k in (0, 1))
        return Stored(Fp8(rows, columns), tensors, sum(part.outputs for part in parts), parts[0].inputs)

    def abreast(self, parts: Sequence[Stored]) -> Stored | None:
        formats = [_format_of(part) for part in parts]
        rows = math.gcd(*(each.block_rows for each in formats))
        columns = math.gcd(*(each.block_columns for each in formats), *(part.inputs for part in parts[:-1]))
        if columns < min(LEAST_BLOCK, *(each.block_columns for each in formats)):
            return None
        pieces = [own._refined(part, rows, columns).tensors for own, part in zip(formats, parts)]
        tensors = tuple(joined([piece[k] for piece in pieces], -1) for k in (0, 1))
        return Stored(Fp8(rows, columns), tensors, parts[0].outputs, sum(part.inputs for part in parts))

    def scaled(self, stored: Stored, factor: float | Float[Tensor, " outputs"]) -> Stored:
        if not isinstance(factor, Tensor):
            return replace(stored, tensors=(stored.tensors[0], stored.tensors[1] * factor))
        fine = self._refined(stored, 1, self.block_columns)
        return replace(fine, tensors=(fine.tensors[0], fine.tensors[1] * factor.view(-1, 1)))

    def encode(self, matrix: Float[Tensor, "*experts outputs inputs"]) -> Stored:
        """Return numbers as FP8 whose largest of each block uses the whole range, a few megabytes at a time."""
        *experts, outputs, inputs = matrix.shape
        rows, columns = min(self.block_rows, outputs), min(self.block_columns, inputs)
        many = matrix.reshape(-1, outputs, inputs)
        codes = torch.empty(many.shape, dtype=CODES, device=matrix.device)
        scales = torch.empty(len(many), -(-outputs // rows), -(-inputs // columns), device=matrix.device)
        step = max(1, ENCODED_AT_ONCE // (rows * inputs))
        for number in range(len(many)):
            for block in range(0, scales.shape[1], step):
                place = slice(block * rows, (block + step) * rows)
                own = self._encoded(many[number, place].float(), rows, columns)
                codes[number, place], scales[number, block : block + step] = own
        tensors = (codes.view(matrix.shape), scales.view(*experts, *scales.shape[1:]))
        return Stored(replace(self, block_rows=rows, block_columns=columns), tensors, outputs, inputs)

    def for_others(self, outputs: int, inputs: int) -> Fp8:
        is_whole = outputs % self.block_rows == 0 == inputs % self.block_columns
        return self if is_whole else Fp8(1, inputs)

    def spelled(self, stored: Stored) -> dict[str, Tensor]:
        codes, scales = stored.tensors
        return {"weight": codes, "weight_scale": scales}

    def stating(self) -> Stating:
        if self.block_rows == 1:
            return by_channel("float-quantized", "float", 8)
        block = [self.block_rows, self.block_columns]
        return stated("float-quantized", "float", 8, "block", block_structure=block)

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return outputs * inputs + SCALE_BYTES * -(-outputs // self.block_rows) * -(-inputs // self.block_columns)

    def _encoded(
        self, matrix: Float[Tensor, "outputs inputs"], rows: int, columns: int
    ) -> tuple[Tensor, Float[Tensor, "rows columns"]]:
        outputs, inputs = matrix.shape
        padding = (0, -inputs % columns, 0, -outputs % rows)
        blocks = torch.nn.functional.pad(matrix, padding).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        scales = blocks.abs().amax((-3, -1)).div(LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :outputs, :inputs]
        # Without the clamp, a quotient that is rounded up would be no number.
        return codes.clamp(-LARGEST, LARGEST).to(CODES), scales

    def _refined(self, stored: Stored, rows: int, columns: int) -> Stored:
        """Return a matrix with smaller blocks, whose sizes divide those of its own."""
        codes, scales = stored.tensors
        if rows != self.block_rows:
            scales = scales.repeat_interleave(self.block_rows // rows, -2)[..., : -(-stored.outputs // rows), :]
        if columns != self.block_columns:
            scales = scales.repeat_interleave(self.block_columns // columns, -1)[..., : -(-stored.inputs // columns)]
        return replace(stored, format=Fp8(rows, columns), tensors=(codes, scales))


def _format_of(stored: Stored) -> Fp8:
    assert isinstance(stored.format, Fp8)
    return stored.format


def _is_alike(source: Int[Tensor, " rows"], size: int) -> bool:
    """Return whether blocks of this size take all their rows from one block each."""
    blocks = torch.cat([source, source[-1:].expand(-len(source) % size)]).view(-1, size)
    return bool((blocks == blocks[:, :1]).all())


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors of any dtype as one."""
    if pieces[0].dtype == CODES:
        return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(CODES)
    return torch.cat(list(pieces), dim)


# How checkpoints spell it ---------------------------------------------------------------------------------------------


def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
    """Return a matrix of which a checkpoint has codes and scales, in any of the shapes that scales may have."""
    codes, scales = tensors[0], tensors[1].float()
    *experts, outputs, inputs = codes.shape
    if scheme.block is not None:
        rows, columns = min(scheme.block[0], outputs), min(scheme.block[1], inputs)
    else:
        rows, columns = 1 if scales.numel() == math.prod(experts) * outputs else outputs, inputs
    own = scales.reshape(*experts, -(-outputs // rows), -(-inputs // columns))
    return Stored(Fp8(rows, columns), (codes, own), outputs, inputs)


def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> tuple[int, ...] | str:
    """Return the sizes of the stored matrix, or why its tensors do not belong together."""
    codes, scales = shapes
    if len(codes) < 2:
        return f"codes have shape {list(codes)}, which is no matrix"
    *experts, outputs, inputs = codes
    if scheme.block is not None:
        wanted = {(*experts, -(-outputs // scheme.block[0]), -(-inputs // scheme.block[1]))}
        if not experts:
            # ModelOpt keeps the dimensions inside a block.
            wanted |= {(rows, 1, columns, 1) for rows, columns in wanted}
    else:
        wanted = {(*experts, outputs, 1), (*experts, outputs), (*experts, 1, 1), (*experts, 1), tuple(experts)}
    return codes if scales in wanted else f"scales have shape {list(scales)}, expected {list(sorted(wanted)[-1])}"


FLOATS = ("F32", "BF16", "F16")
SPELLINGS = tuple(
    Spelling("fp8", ("", scales), (("F8_E4M3",), FLOATS), sizes, read)
    for scales in ("_scale_inv", "_scale", ".qscale_weight")
)


def claim(statement: Statement) -> Scheme | None:
    """Return what a configuration states, if it is FP8."""
    if statement.method == "fp8" or statement.algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Scheme("fp8", statement.block)
    if statement.algorithm == "FP8_PB_WO":
        return Scheme("fp8", statement.block or (BLOCK, BLOCK))
    if statement.method == "compressed-tensors" and (statement.kind, statement.bits) == ("float", 8):
        return Scheme("fp8", (statement.block or (BLOCK, BLOCK)) if statement.strategy == "block" else None)
    return None


def of(scheme: Scheme, outputs: int, inputs: int) -> Fp8 | None:
    """Return the format of a matrix of this size."""
    rows, columns = scheme.block or (1, inputs)
    return Fp8(min(rows, outputs), min(columns, inputs)) if scheme.kind == "fp8" else None
