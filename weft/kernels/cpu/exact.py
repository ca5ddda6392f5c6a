"""Layouts of weights in exact mode: panels, or formats that are decoded into them.

One C++ kernel multiplies panels with any number of rows, each alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from weft.kernels import large_pages
from weft.kernels.cpu.linear import prepared_as_stored, shortened
from weft.kernels.experts import ExpertWeights
from weft.kernels.formats.rounded import NOTHING
from weft.kernels.formats.stored import Stored
from weft.kernels.native import library as native
from weft.kernels.native.layouts import as_panels
from weft.kernels.native.linear import pack
from weft.kernels.weight import Weight


def prepare(weight: Weight, twice: bool, rounds: Set[str] = NOTHING) -> Weight:
    return Weight(tuple(in_panels(part, rounds) for part in weight.parts), weight.bias)


def prepare_experts(layer: ExpertWeights, twice: bool, rounds: Set[str] = NOTHING) -> ExpertWeights:
    return replace(layer, first=in_panels(layer.first, rounds), second=in_panels(layer.second, rounds))


def in_panels(part: Stored, rounds: Set[str]) -> Stored:
    """Return a matrix in panels; unchanged if there are no C++ kernels for it."""
    matrix = part.dense
    if matrix is None:
        return prepared_as_stored(part, rounds)
    if not matrix.numel() or matrix.dtype not in native.DTYPES or not native.available():
        return part
    return as_panels(part, pack(shortened(matrix.detach()), large_pages.empty))
