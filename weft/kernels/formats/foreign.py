"""Quantised checkpoints of tools that Weft does not read: recognised by the tensors that they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from weft.base.errors import ModelError
from weft.kernels.formats.other_tools import refusal
from weft.kernels.formats.scheme import Scheme, Spelling
from weft.kernels.formats.stored import Stored

FLOATS, BYTES = ("F32", "BF16", "F16"), ("U8", "I8")
# Tensors that only this tool writes for a matrix, by what they append to its name, and their dtypes.
TENSORS = {
    "MLX": (((".weight", ("U32",)), (".scales", (*FLOATS, "U8"))),),
    "ExLlamaV2 (EXL2)": (((".q_weight", ("I32",)), (".q_scale", ("I32",))),),
    "ExLlamaV3 (EXL3)": (((".trellis", ("I16",)),),),
    "HQQ": (((".W_q", (*BYTES, "I32", "F32", "F16", "BF16")),),),
    "bitsandbytes": (
        ((".weight", ("U8",)), (".weight.absmax", (*BYTES, *FLOATS))),
        ((".weight", ("I8",)), (".SCB", FLOATS)),
    ),
}


def _spelling(tool: str, tensors: tuple[tuple[str, tuple[str, ...]], ...]) -> Spelling:
    """Return how the tool spells a matrix. No such matrix has sizes: asking for them says why."""

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> NoReturn:
        raise ModelError(refusal(tool))

    def read(given: Sequence[Tensor], scheme: Scheme) -> Stored:
        raise ModelError(refusal(tool))

    names, dtypes = zip(*tensors)
    return Spelling(tool, names, dtypes, sizes, read, is_stated=False)


SPELLINGS = tuple(_spelling(tool, each) for tool, several in TENSORS.items() for each in several)
