"""FP8 that tensor cores multiply as it is, with rows that are rounded to FP8 too (`--activations fp8`).

Both operands have a float32 for each 128 inputs, so that sum is one product of tensor cores, which both scales then
multiply. Codes lie line by line, padded with zeros to whole blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.kernels.cuda.formats.packed import STEP, CodeTiles, pack
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.formats.fp8 import CODES, Fp8
from weft.kernels.formats.rounded import FP8, FP8_BLOCK, RoundedRows, takes_fp8
from weft.kernels.formats.stored import Stored

# The first GPUs whose tensor cores multiply FP8.
CAPABILITY = (8, 9)
assert FP8_BLOCK == STEP, "a tile of inputs has one scale of its rows"


@dataclass(frozen=True, slots=True)
class CodeLines(CodeTiles):
    """FP8 for rows in FP8. Tensors: codes [outputs, whole tiles of inputs], then scales as those of `CodeTiles`.

    There is one of 128 inputs and `block_rows` outputs, or without `runs` one for each output.
    """

    @property
    def rows_in(self) -> str | None:
        return FP8

    @property
    def pairs(self) -> int:
        return 1

    def unpacked(self, stored: Stored) -> Stored:
        codes, scales = stored.tensors
        codes = codes[..., : stored.inputs]
        if self.runs:
            return replace(stored, format=Fp8(self.block_rows, STEP), tensors=(codes, scales))
        return replace(stored, format=Fp8(1, stored.inputs), tensors=(codes, scales.unsqueeze(-1)))

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        rows = self.block_rows if self.runs else 1
        if start % rows:
            return None
        codes, scales = stored.tensors
        own = scales[..., start // rows : -(-end // rows), :] if self.runs else scales[..., start:end]
        return Stored(self, (codes[..., start:end, :], own), end - start, stored.inputs)


def prepared(stored: Stored, rounds: Set[str]) -> Stored:
    """Return a matrix, or those of experts, as kernels read it fastest with rows that are rounded so."""
    if FP8 not in rounds or not takes_fp8(stored):
        return pack(stored)
    return in_lines(stored) or RoundedRows.of(pack(stored), FP8)


def in_lines(stored: Stored) -> Stored | None:
    """Return FP8 as tensor cores read it; None if a tile has several scales, or the GPU does not multiply FP8."""
    form, (codes, scales) = stored.format, stored.tensors
    assert isinstance(form, Fp8)
    whole = form.block_columns >= stored.inputs
    if gpu_of(codes.device).capability < CAPABILITY or not (whole or form.block_columns % STEP == 0):
        return None
    steps = -(-stored.inputs // STEP)
    lines = codes if stored.inputs % STEP == 0 else padded(codes, steps * STEP)
    if whole and (form.block_rows == 1 or steps > 1):
        own = scales.squeeze(-1).repeat_interleave(form.block_rows, -1)[..., : stored.outputs]
        layout = CodeLines("e4m3 in lines 1")
    else:
        own = scales.repeat_interleave(max(1, form.block_columns // STEP), -1)[..., :steps]
        layout = CodeLines("e4m3 in lines 1", form.block_rows, 1)
    return replace(stored, format=layout, tensors=(lines.contiguous(), own.contiguous()))


def padded(codes: Tensor, columns: int) -> Tensor:
    found = torch.zeros(*codes.shape[:-1], columns, dtype=torch.uint8, device=codes.device)
    found[..., : codes.shape[-1]] = codes.view(torch.uint8)
    return found.view(CODES)
