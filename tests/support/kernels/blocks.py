"""Matrices of random blocks, as GGUF files have them."""

from __future__ import annotations

import torch

from weft.kernels.formats.block_types import BLOCK_TYPES, MXFP4, NVFP4
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.stored import Stored

# Where the 16-bit floats of a block lie. Random bytes need not be numbers there.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
NAMES = {form: name for name, form in BLOCK_TYPES.items()}


def random_blocks(form: BlockFormat, *outer: int, inputs: int, generator: torch.Generator | None = None) -> Stored:
    """Return a matrix, or those of experts, of random bytes whose scales are small random numbers."""
    shape = (*outer, inputs // form.numbers)
    codes = torch.randint(0, 256, (*shape, form.bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES.get(NAMES[form], (0,)):
        halves = torch.randn(*shape, 1, generator=generator) * 0.01
        codes[..., place : place + 2] = halves.half().view(torch.uint8)
    if form == MXFP4:
        codes[..., 0] = torch.randint(0, 125, shape, generator=generator)
    if form == NVFP4:
        codes[..., :4] = torch.randint(0, 128, (*shape, 4), generator=generator)
    return form.of(codes.flatten(-2))
