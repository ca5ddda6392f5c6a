"""Rows that are rounded to eight bits before they are multiplied with stored formats. These are the definitions.

What a row is rounded to depends on its own numbers only, so a token computes the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.formats.fp8 import CODES, LARGEST, Fp8
from weft.kernels.formats.mxfp4 import BLOCK as MXFP8_BLOCK
from weft.kernels.formats.stored import Format, Layout, Stored

# What rows may be rounded to.
INTEGERS, FP8 = "integers", "fp8"
NOTHING: Set[str] = frozenset()
# Integers: numbers with one scale, and the largest integer.
BLOCK, MOST = 32, 127
# Blocks whose largest number is not above it become zeros: the inverse of their scale is no float32.
LEAST = 2.0**-100
# FP8: numbers with one scale, and the least that counts as the largest of them.
FP8_BLOCK, FP8_LEAST = 128, 1e-10


def kinds_of(activations: str, device: str) -> Set[str]:
    """Return what rows are rounded to on a kind of device, by the option `--activations`.

    >>> sorted(kinds_of("fp8", "cpu")), sorted(kinds_of("fp8", "cuda")), sorted(kinds_of("auto", "cuda"))
    (['fp8', 'integers'], ['fp8'], [])
    """
    integers = {INTEGERS} if device == "cpu" and activations != "wide" else NOTHING
    return integers | ({FP8} if activations == "fp8" else NOTHING)


def in_integers(x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n inputs"]:
    """Return what rows in integers of eight bits stand for, in float32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # A quotient of a plain number is rounded twice.
    inverse = torch.where(largest > LEAST, torch.full_like(largest, MOST) / largest, 0.0)
    found: Tensor = ((blocks * inverse).round() * (largest * (1 / MOST))).flatten(-2)
    return found


def in_fp8(x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n inputs"]:
    """Return what rows in FP8 stand for, in float32: codes (e4m3) times the scale of their block.

    As public engines round the inputs of matrices in FP8: of each 128 inputs, the largest becomes 448.
    """
    inputs = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -inputs % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_LEAST) * (1 / LARGEST)
    codes = (blocks / scales).clamp(-LARGEST, LARGEST).to(CODES)
    found: Tensor = (codes.float() * scales).flatten(-2)[..., :inputs]
    return found


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {INTEGERS: in_integers, FP8: in_fp8}


def takes_fp8(stored: Stored) -> bool:
    """Return whether a matrix is multiplied with rows in FP8 where `--activations fp8` asks for that: not MXFP8."""
    form = stored.format
    return isinstance(form, Fp8) and not form.block_columns == MXFP8_BLOCK < stored.inputs


@dataclass(frozen=True, slots=True)
class RoundedRows(Layout):
    """A matrix whose rows are rounded before they are multiplied with what `inner` stores, by other kernels."""

    inner: Format
    kind: str

    @staticmethod
    def of(stored: Stored, kind: str) -> Stored:
        return replace(stored, format=RoundedRows(f"{stored.format.name}, rows of {kind}", stored.format, kind))

    @property
    def rows_in(self) -> str | None:
        return self.kind

    def as_stored(self, stored: Stored) -> Stored:
        """Return the matrix that rounded rows are multiplied with."""
        return replace(stored, format=self.inner)

    def rounded(self, x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n inputs"]:
        """Return rounded rows, in float32."""
        return ROUNDINGS[self.kind](x)

    def cut_rows(self, stored: Stored, start: int, end: int) -> Stored | None:
        found = self.inner.cut_rows(self.as_stored(stored), start, end)
        return None if found is None else RoundedRows.of(found, self.kind)
