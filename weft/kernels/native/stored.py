"""Panels of matrices in stored formats, as stored.h and codes.h read them.

A panel holds 32 outputs: units of one or eight blocks of 32 inputs, or of the blocks of a group. A unit has the scales
that its blocks share, and each block its own scales, then codes, interleaved so that one vector holds those of several
outputs. Codes have no sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels import large_pages
from weft.kernels.formats import block_types
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.stored import Format, Stored
from weft.kernels.native.layouts import StoredPanels
from weft.kernels.native.library import use
from weft.kernels.native.packing import PANEL, put_in_panels

# Inputs of a block.
BLOCK = 32
# In the order of stored.h.
KINDS = ("floats", "brains", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
         "mxfp4", "fp8", "int4", "int4_zeros", "int8", "int8_zeros", "nvfp4")  # fmt: skip
# Codes that are no number.
FP8_NONE, MXFP4_NONE = 0x7F, 0xFF


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The bits of a kind's codes, and bytes of scales, of each output: those of a unit, and of each block in it."""

    bits: int
    shared_bytes: int
    own_bytes: int = 0
    blocks: int = 1  # of a unit

    @property
    def block_bytes(self) -> int:
        return self.own_bytes + BLOCK * self.bits // 8


FORMATS = {
    "q8_0": CodeLayout(8, 2),
    "q4_0": CodeLayout(4, 2),
    "q4_1": CodeLayout(4, 4),
    "q5_0": CodeLayout(5, 2),
    "q5_1": CodeLayout(5, 4),
    "q4_k": CodeLayout(4, 4, 2, 8),
    "q5_k": CodeLayout(5, 4, 2, 8),
    "q6_k": CodeLayout(6, 2, 2, 8),
    "iq4_nl": CodeLayout(4, 2),
    "iq4_xs": CodeLayout(4, 2, 1, 8),
    "mxfp4": CodeLayout(4, 1),
}
NAMES: dict[Format, str] = {
    block_types.Q8_0: "q8_0",
    block_types.Q4_0: "q4_0",
    block_types.Q4_1: "q4_1",
    block_types.Q5_0: "q5_0",
    block_types.Q5_1: "q5_1",
    block_types.Q4_K: "q4_k",
    block_types.Q5_K: "q5_k",
    block_types.Q6_K: "q6_k",
    block_types.IQ4_NL: "iq4_nl",
    block_types.IQ4_XS: "iq4_xs",
    block_types.MXFP4: "mxfp4",
    Mxfp4(): "mxfp4",
}
# Those whose units have the blocks of a group, and the last one fewer.
GROUPS = {
    "int4": CodeLayout(4, 4),
    "int4_zeros": CodeLayout(4, 8),
    "int8": CodeLayout(8, 4),
    "int8_zeros": CodeLayout(8, 8),
    "nvfp4": CodeLayout(4, 4, 2),
}


def grouped_kind(format: Grouped | Nvfp4) -> str | None:
    """Return the kind of groups; None if their blocks would have several scales."""
    if isinstance(format, Nvfp4):
        return "nvfp4"
    name = f"int{format.bits}_zeros" if format.has_zeros else f"int{format.bits}"
    return name if format.group % BLOCK == 0 else None


def name_of(format: Format) -> str | None:
    """Return the kind of a format whose codes are multiplied as integers; None if there is none."""
    if isinstance(format, (Grouped, Nvfp4)):
        return grouped_kind(format)
    return NAMES.get(format) if isinstance(format, (BlockFormat, Mxfp4)) else None


def panel_bytes(layout: StoredPanels, inputs: int) -> int:
    """Return the size of a panel."""
    if KINDS[layout.kind] == "fp8":
        return PANEL * (4 * -(-inputs // layout.columns) + inputs)
    own = GROUPS.get(KINDS[layout.kind]) or FORMATS[KINDS[layout.kind]]
    unit = layout.columns or BLOCK * own.blocks
    return PANEL * (own.shared_bytes * -(-inputs // unit) + own.block_bytes * (inputs // BLOCK))


@dataclass(frozen=True, slots=True)
class PanelParts:
    """Tensors of a matrix, or of all experts', for packing.cpp: codes, scales of units of `columns` inputs, of blocks.

    A matrix in blocks has its scales in the first.
    """

    kind: str
    codes: Tensor
    shared: Tensor | None = None
    own: Tensor | None = None
    columns: int = 0


def pack(stored: Stored, are_rounded: bool) -> Stored | None:
    """Return a matrix, or all experts', in panels; None if there is no kernel for it."""
    # The kernels that all models share call functions of this source, so it must be compiled first.
    use({"stored"})
    parts = parts_of(stored)
    if parts is None or not parts.codes.numel():
        return None
    rounds, columns = are_rounded and parts.kind != "fp8", 0 if parts.kind in FORMATS else parts.columns
    layout = StoredPanels(f"panels of {stored.format.name}", KINDS.index(parts.kind), rounds, columns)
    size = (-(-stored.outputs // PANEL), panel_bytes(layout, stored.inputs))
    panels = large_pages.empty(*stored.tensors[0].shape[:-2], *size, dtype=torch.uint8)
    are_numbers = put_in_panels(
        parts.codes, stored.outputs, stored.inputs, layout.kind, panels, parts.shared, parts.own, parts.columns
    )
    return Stored(layout, (panels,), stored.outputs, stored.inputs) if are_numbers else None


def parts_of(stored: Stored) -> PanelParts | None:
    """Return what panels are made from; None if there are no panels of this format, or scales that are no number."""
    format = stored.format
    if isinstance(format, Fp8):
        codes, scales = stored.tensors
        by_output = scales.float().repeat_interleave(format.block_rows, -2)[..., : stored.outputs, :]
        return PanelParts("fp8", codes.view(torch.uint8), by_output, columns=format.block_columns)
    if isinstance(format, (Grouped, Nvfp4)):
        name = None if stored.inputs % BLOCK else grouped_kind(format)
        if name is None:
            return None
        return of_groups(name, stored, format) if isinstance(format, Grouped) else of_runs(stored)
    kind = name_of(format)
    if kind is None:
        return None
    if kind == "mxfp4":
        codes = stored.tensors[0]
        apart = stored.tensors[1] if isinstance(format, Mxfp4) else None
        exponents = codes[..., :: block_types.MXFP4.bytes] if apart is None else apart
        return None if bool((exponents == MXFP4_NONE).any()) else PanelParts(kind, codes, apart, columns=BLOCK)
    return PanelParts(kind, stored.tensors[0])


def of_groups(kind: str, stored: Stored, format: Grouped) -> PanelParts:
    """Return codes and, for each group, a factor and what is added, in float32."""
    # The greatest power of two in a group; a group of all inputs is longer than they are.
    group = format.group & -format.group
    if format.group == stored.inputs:
        group = 1 << (stored.inputs - 1).bit_length()
    factors = stored.tensors[1].float()
    values = [factors]
    if format.has_zeros:
        values.append((format.middle - stored.tensors[2].float()) * factors)
    header = torch.stack(values, -1)
    if group < format.group:
        header = header.repeat_interleave(format.group // group, -2)[..., : -(-stored.inputs // group), :]
    return PanelParts(kind, stored.tensors[0], header, columns=group)


def of_runs(stored: Stored) -> PanelParts | None:
    """Return the same of NVFP4, whose blocks have two scales. Kernels double its codes."""
    codes, scales, factors = stored.tensors
    if bool(((scales & FP8_NONE) == FP8_NONE).any()):
        return None
    group = max(BLOCK, 1 << (stored.inputs - 1).bit_length())
    return PanelParts("nvfp4", codes, factors / 2, scales, group)
