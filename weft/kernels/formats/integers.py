"""How tools spell integers in groups: compressed-tensors, GPTQ, AWQ and AutoRound, read into one form (`groups.py`).

All pack codes of four or eight bits into words of 32 bits. They differ in the direction of packing, in the order inside
a word, in whether zeros are stored, and in what is added to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from weft.base.errors import ModelError
from weft.kernels.formats.blocks import OtherInputs
from weft.kernels.formats.groups import Grouped, halves, paired
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import Stored

KIND = "integers"
WORD = 32
# AWQ: the output whose code is at each place of a word, the lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# What GPTQ's first version takes off its zeros before it stores them.
GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
FLOATS = ("F32", "BF16", "F16")

Sizes = tuple[int, ...] | str


def codes_in(words: Int[Tensor, "*any words"], bits: int) -> UInt8[Tensor, "*any codes"]:
    """Return the codes of words, the lowest bits first."""
    # Files and all supported processors have the lowest byte first.
    found = words.contiguous().view(torch.uint8)
    return halves(found) if bits == 4 else found


def form_of(scheme: Scheme, inputs: int, has_zeros: bool) -> Grouped:
    assert scheme.bits is not None
    return Grouped(scheme.bits, scheme.group or inputs, has_zeros)


def groups_in(scheme: Scheme, inputs: int) -> int:
    return -(-inputs // (scheme.group or inputs))


def in_order(stored: Stored, group_of: Int[Tensor, " inputs"] | None) -> Stored:
    """Return a matrix whose inputs belong to these groups: as it is if they are in order, else sorted by group."""
    if group_of is None or bool((group_of < 0).all()):
        return stored
    format = stored.format
    assert isinstance(format, Grouped)
    expected = torch.arange(stored.inputs) // format.group
    if torch.equal(group_of.long(), expected):
        return stored
    order = group_of.long().argsort(stable=True)
    if not torch.equal(group_of[order].long(), expected):
        raise ModelError(
            f"g_idx must put {format.group} inputs into each of {int(expected[-1]) + 1} groups, and it does not"
        )
    moved = format.codes_of(stored).index_select(-1, order)
    codes = paired(moved) if format.bits == 4 else moved
    return OtherInputs.of(format.of((codes, *stored.tensors[1:]), stored.inputs), order)


# compressed-tensors ---------------------------------------------------------------------------------------------------


def packed_spelling(has_zeros: bool, has_order: bool) -> Spelling:
    """Return the spelling of `pack-quantized`: codes packed along inputs, zeros along outputs."""
    names = ["_packed", "_scale", *["_zero_point"] * has_zeros, *["_g_idx"] * has_order]

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> Sizes:
        codes, scales, *others = shapes
        if len(codes) < 2 or scheme.packing != "pack-quantized" or not scheme.bits:
            return f"packed integers of shape {list(codes)} are no matrix in {scheme.packing}"
        *experts, outputs, words = codes
        inputs = words * WORD // scheme.bits
        wanted = (*experts, outputs, groups_in(scheme, inputs))
        zeros = (*experts, -(-outputs * scheme.bits // WORD), wanted[-1])
        if not scheme.symmetric and not has_zeros:
            return "it is stated as asymmetric, but has no weight_zero_point"
        if scales != wanted and not (wanted[-1] == 1 and scales in ((1,), (outputs,))):
            return f"scales have shape {list(scales)}, expected {list(wanted)}"
        if has_zeros and others[0] != zeros:
            return f"zeros have shape {list(others[0])}, expected {list(zeros)}"
        if has_order and others[-1] != (inputs,):
            return f"g_idx has shape {list(others[-1])}, expected [{inputs}]"
        return *experts, outputs, inputs

    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        assert scheme.bits is not None
        words, scales, *others = tensors
        inputs, outputs = words.shape[-1] * WORD // scheme.bits, words.shape[-2]
        own = scales.reshape(-1, 1).expand(outputs, 1) if scales.ndim == 1 else scales
        parts: list[Tensor] = [words.contiguous().view(torch.uint8), own]
        if has_zeros:
            parts.append(codes_in(others[0].transpose(-1, -2), scheme.bits)[..., :outputs].transpose(-1, -2))
        stored = form_of(scheme, inputs, has_zeros).of(tuple(parts), inputs)
        return in_order(stored, others[-1] if has_order else None)

    dtypes = (("I32",), FLOATS, *[("I32",)] * has_zeros, *[("I32", "I64")] * has_order)
    return Spelling(KIND, tuple(names), dtypes, sizes, read)


def plain_spelling(has_zeros: bool) -> Spelling:
    """Return the spelling of `int-quantized`: a byte with sign for each number, scales by output or one."""

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> Sizes:
        codes, *others = shapes
        if len(codes) < 2 or scheme.packing != "int-quantized":
            return f"integers of shape {list(codes)} are no matrix in {scheme.packing}"
        *experts, outputs, inputs = codes
        wanted = (*experts, outputs, groups_in(scheme, inputs))
        for each in others:
            if each != wanted and not (wanted[-1] == 1 and each in ((1,), (), (outputs,))):
                return f"scales or zeros have shape {list(each)}, expected {list(wanted)}"
        return codes

    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        codes, *others = tensors
        *experts, outputs, inputs = codes.shape
        wanted = (*experts, outputs, groups_in(scheme, inputs))
        spread = [each.reshape(-1, 1).expand(wanted) if each.ndim < 2 else each for each in others]
        parts = [codes.view(torch.uint8) ^ 0x80, spread[0]]
        if has_zeros:
            parts.append(spread[1].contiguous().view(torch.uint8) ^ 0x80)
        return form_of(scheme, inputs, has_zeros).of(tuple(parts), inputs)

    names = ("", "_scale", *["_zero_point"] * has_zeros)
    return Spelling(KIND, names, (("I8",), FLOATS, *[("I8",)] * has_zeros), sizes, read)


# GPTQ and AWQ ---------------------------------------------------------------------------------------------------------


def transposed_spelling(has_order: bool) -> Spelling:
    """Return the spelling of GPTQ and AWQ, whose tensors have the same names: inputs first, always with zeros."""

    def sizes(shapes: Sequence[tuple[int, ...]], scheme: Scheme) -> Sizes:
        codes, zeros, scales, *order = shapes
        if not len(codes) == len(zeros) == len(scales) == 2 or not scheme.bits:
            return f"qweight has shape {list(codes)}, which is no matrix"
        each = WORD // scheme.bits
        by_input = scheme.packing in GPTQ_OFFSETS
        inputs, outputs = (codes[0] * each, codes[1]) if by_input else (codes[0], codes[1] * each)
        groups = groups_in(scheme, inputs)
        if scales != (groups, outputs):
            return f"scales have shape {list(scales)}, expected {[groups, outputs]}"
        if zeros != (groups, outputs // each) or outputs % each:
            return f"qzeros have shape {list(zeros)}, expected {[groups, outputs // each]}"
        if order and order[0] != (inputs,):
            return f"g_idx has shape {list(order[0])}, expected [{inputs}]"
        return outputs, inputs

    def read(tensors: Sequence[Tensor], scheme: Scheme) -> Stored:
        words, zero_words, scales, *order = tensors
        reader = read_gptq if scheme.packing in GPTQ_OFFSETS else read_awq
        codes, zeros, inputs = reader(words, zero_words, scheme)
        # Symmetric matrices store the same zero everywhere.
        form = form_of(scheme, inputs, has_zeros=True)
        has_zeros = not scheme.symmetric or bool((zeros != form.middle).any())
        parts = (codes, scales.transpose(-1, -2), *((zeros,) if has_zeros else ()))
        return in_order(form_of(scheme, inputs, has_zeros).of(parts, inputs), order[0] if order else None)

    names = (".qweight", ".qzeros", ".scales", *[".g_idx"] * has_order)
    dtypes = (("I32",), ("I32",), FLOATS, *[("I32", "I64")] * has_order)
    return Spelling(KIND, names, dtypes, sizes, read)


def read_gptq(words: Tensor, zero_words: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, int]:
    """Return codes, zeros and the number of inputs. Words hold adjacent inputs, those of zeros adjacent outputs."""
    assert scheme.bits is not None
    offset = GPTQ_OFFSETS[scheme.packing or ""]
    zeros = (codes_in(zero_words, scheme.bits) + offset) & ((1 << scheme.bits) - 1)
    packed = words.transpose(-1, -2).contiguous().view(torch.uint8)
    return packed, zeros.transpose(-1, -2), words.shape[0] * WORD // scheme.bits


def read_awq(words: Tensor, zero_words: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, int]:
    """Return codes, zeros and the number of inputs. Words hold adjacent outputs, in an order of their own."""

    def outputs_of(some: Tensor) -> Tensor:
        places = torch.tensor(AWQ_ORDER).argsort()
        words: Tensor = codes_in(some, 4).unflatten(-1, (-1, len(AWQ_ORDER)))
        return words[..., places].flatten(-2).transpose(-1, -2)

    return paired(outputs_of(words)), outputs_of(zero_words), words.shape[0]


# Those with more tensors first: the first whose tensors are all there counts.
SPELLINGS = (
    packed_spelling(True, True), packed_spelling(False, True), packed_spelling(True, False),
    packed_spelling(False, False),
    plain_spelling(True), plain_spelling(False), transposed_spelling(True), transposed_spelling(False),
)  # fmt: skip


def claim(statement: Statement) -> Scheme | None:
    """Return what a configuration states, if it is integers in groups."""
    if statement.kind != "int" or statement.bits not in (4, 8):
        return None
    packing, group = statement.format, statement.group
    if statement.method == "compressed-tensors":
        if packing == "naive-quantized":
            packing = "int-quantized"
        known = packing == "pack-quantized" or (packing == "int-quantized" and statement.bits == 8)
        if statement.strategy in ("channel", "tensor"):
            group = None
        elif statement.strategy not in ("group", None) or group is None:
            return None
    else:
        known = packing in GPTQ_OFFSETS or (packing == "gemm" and statement.bits == 4)
    return Scheme(KIND, None, statement.bits, group, packing, statement.symmetric) if known else None


def of(scheme: Scheme, outputs: int, inputs: int) -> Grouped | None:
    """Return the format of a matrix of this size."""
    return form_of(scheme, inputs, not scheme.symmetric) if scheme.kind == KIND else None
