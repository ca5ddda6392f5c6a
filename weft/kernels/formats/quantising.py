"""Which matrices of a 16-bit checkpoint are quantised while it loads, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.kernels.formats.block_types import Q4_K, Q6_K, Q8_0
from weft.kernels.formats.fp8 import BLOCK, Fp8
from weft.kernels.formats.groups import GROUP, Grouped
from weft.kernels.formats.mxfp4 import BLOCK as FOUR_BIT_BLOCK
from weft.kernels.formats.mxfp4 import Mxfp4
from weft.kernels.formats.stored import DENSE, Format

KINDS = ("off", "fp8", "int8", "int4", "mxfp4", "q8_0", "q4_k")
# What public recipes leave in 16 bits, by the model's own names: routers and gates, decays and step sizes of recurrent
# layers, low-rank and latent projections, and the matrix that joins the inputs of an MTP head.
KEPT = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate|in_proj_(a|b|ba)|(a|b|f_a|f_b|g_a|g_b)_proj|fc[12]_latent_proj|fc|eh_proj)$"
)
HEADS, EMBEDDINGS = re.compile(r"(^|\.)lm_head$"), re.compile(r"(^|\.)embed\w*$")


@dataclass(frozen=True, slots=True)
class Quantising:
    """How to quantise matrices of plain numbers. `head`: the output head too, also if it is the embedding."""

    kind: str = "off"
    head: bool = False

    def __post_init__(self) -> None:
        assert self.kind in KINDS

    def format_of(self, name: str, outputs: int, inputs: int, tied: bool = False) -> Format:
        """Return the format of a matrix, by the model's own name for it. `tied`: the embedding is the head.

        >>> Quantising("fp8").format_of("model.layers.0.mlp.up_proj", 512, 200, tied=False)
        Fp8(block_rows=128, block_columns=128, name='fp8 1')
        """
        name = name.removesuffix(".weight")
        if self.kind == "off":
            return DENSE
        is_head = HEADS.search(name) is not None or (tied and EMBEDDINGS.search(name) is not None)
        if (is_head and not self.head) or (not is_head and (EMBEDDINGS.search(name) or KEPT.search(name))):
            return DENSE
        if self.kind in ("q8_0", "q4_k"):
            return in_blocks(self.kind, is_head, inputs)
        return self._format_of(outputs, inputs)

    def _format_of(self, outputs: int, inputs: int) -> Format:
        if self.kind == "int8":
            return Grouped(8, inputs)
        if self.kind == "int4":
            return Grouped(4, min(GROUP, inputs))
        if self.kind == "mxfp4":
            return DENSE if inputs % FOUR_BIT_BLOCK else Mxfp4()
        # A block with the last few outputs alone would cost kernels more than scales for each output.
        return Fp8(1, inputs) if outputs % BLOCK else Fp8(BLOCK, min(BLOCK, inputs))


def in_blocks(kind: str, is_head: bool, inputs: int) -> Format:
    """Return the type of blocks for a matrix. Of rows that are no whole blocks, smaller blocks, or none.

    >>> [in_blocks("q4_k", False, inputs).name for inputs in (512, 288, 100)]
    ['q4_k 1', 'q8_0 1', 'dense']
    """
    wanted = [Q8_0] if kind == "q8_0" else [Q6_K if is_head else Q4_K, Q8_0]
    return next((format for format in wanted if inputs % format.numbers == 0), DENSE)


AS_STORED = Quantising()
