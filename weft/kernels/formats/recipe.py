"""Which matrices of a checkpoint are quantised, and how: `quantization_config` in the words of each tool."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.base.errors import ModelError
from weft.kernels.formats import block_types, foreign, fp8, integers, mxfp4, mxfp8, nvfp4, other_tools
from weft.kernels.formats.fields import mapping, shown
from weft.kernels.formats.rules import READERS, StatedRule
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import DENSE, Format

# The first that claims a statement counts: MXFP8 is FP8 too.
FORMATS = (mxfp8, fp8, mxfp4, nvfp4, integers, block_types)
_OWN: tuple[Spelling, ...] = tuple(spelling for format in FORMATS for spelling in format.SPELLINGS)
SPELLINGS = (*_OWN, *foreign.SPELLINGS)
STATED = tuple(sorted({spelling.kind for spelling in _OWN if spelling.is_stated}))
# Scales of activations and of cached keys and values, which stay 16 bits wide here, and sizes that others say as well.
LEFT_OUT = re.compile(
    r"(\.(input_scale|activation_scale|qscale_act|input_global_scale|input_zero_point|[qkv]_scale|weight_shape)|_input_scale)$"
)
# Matrices that tools leave in 16 bits whether or not a list says so.
WIDE = re.compile(
    r"(^|\.)(embed\w*|\w*embeddings?|lm_head|output|gate|router|shared_expert_gate|\w*conv\w*|\w*norm\w*)$"
)


def is_wide(name: str) -> bool:
    """Return whether tools leave a module in 16 bits whether or not a list says so."""
    return WIDE.search(name) is not None


def claimed(statement: Statement) -> Scheme | None:
    """Return what a statement means; None: no format here is that."""
    found: list[Scheme | None] = [format.claim(statement) for format in FORMATS]
    return next((scheme for scheme in found if scheme is not None), None)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a configuration states, rule by rule: the first that matches a name counts."""

    rules: tuple[StatedRule, ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        """Return how a module's matrix is quantised by its name in the checkpoint; raise if no format here is that."""
        statement = next((rule.statement for rule in self.rules if rule.matches(name)), None)
        if statement is None:
            return None
        scheme = claimed(statement)
        if scheme is None:
            raise ModelError(
                f"{name} is quantised as {statement}, which is not supported; use weights in "
                f"{', '.join(STATED)} or 16 bits"
            )
        return scheme

    def format_of(self, name: str, outputs: int, inputs: int) -> Format:
        """Return the format that a matrix of this size would have in a checkpoint."""
        scheme = None if is_wide(name) else self.scheme_of(name)
        found = [format.of(scheme, outputs, inputs) for format in FORMATS] if scheme is not None else []
        return next((each for each in found if each is not None), DENSE)


def recipe_of(stated: object, beside: object = None) -> Recipe:
    """Return the rules of `quantization_config`, or without one those of `hf_quant_config.json` beside it."""
    if not stated and beside:
        stated = mapping(mapping(beside, "hf_quant_config.json").get("quantization"), "hf_quant_config.json")
        stated = {"quant_method": "modelopt", **stated}
    if not stated:
        return Recipe()
    fields = mapping(stated, "config.json")
    other_tools.refuse(fields)
    method = fields.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(
            f"quantization_config: quant_method {shown(method)} is not supported; use {', '.join(READERS)}"
        )
    return Recipe(tuple(reader(fields)))
