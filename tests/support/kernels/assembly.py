"""What a few instructions of PTX compute, in Python: logic of 32 bits, and pairs of 16 bits."""

from __future__ import annotations

import operator
import re

import torch

LOGIC = {
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift,
}  # fmt: skip
WORD = 0xFFFFFFFF


def run_assembly(text: str, *words: int, outputs: int = 1) -> int:
    """Return $0, of these instructions with $1 and whatever else they are given. Of two `outputs` $1 is above $0."""
    values = {f"${number}": word & WORD for number, word in enumerate(words, outputs)}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for name, target, operands in re.findall(r"([a-z]\w*(?:\.\w+)+) (\{\w+, \w+\}|[$\w]+), ([^;]+);", text):
        given = [value(each) for each in re.split(r", *", operands)]
        if name == "mov.b32" and target.startswith("{"):
            low, high = re.findall(r"\w+", target)
            values[low], values[high] = given[0] & 0xFFFF, given[0] >> 16
        elif name == "mov.b32":
            [values[target]] = given
        elif name in PAIRS:
            values[target] = sum(PAIRS[name](*(each >> shift & 0xFFFF for each in given)) << shift for shift in (0, 16))
        elif name == "cvt.rn.f16x2.e4m3x2":
            codes = torch.tensor([given[0] & 0xFF, given[0] >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
            low, high = (int(each) & 0xFFFF for each in codes.half().view(torch.int16))
            values[target] = low | high << 16
        elif name == "prmt.b32":
            one, other, chosen = given
            places = [chosen >> 4 * place & 15 for place in range(4)]
            assert max(places) < 8, "a sign is not repeated"
            values[target] = sum(((one | other << 32) >> 8 * each & 0xFF) << 8 * i for i, each in enumerate(places))
        else:
            operation, kind = name.split(".")
            assert kind == "b32"
            one, other = given
            values[target] = LOGIC[operation](one, other) & WORD
    return sum(values[f"${number}"] << 32 * number for number in range(outputs))


def difference(one: int, other: int) -> int:
    """Return the bits of one - other, of the bits of float16."""
    a, b = (torch.tensor(bits).to(torch.int16).view(torch.float16) for bits in (one, other))
    return int((a - b).view(torch.int16)) & 0xFFFF


def fused(one: int, other: int, added: int) -> int:
    """Return the bits of one * other + added, rounded once, of the bits of bfloat16."""
    a, b, c = (float(torch.tensor(bits << 16).int().view(torch.float32)) for bits in (one, other, added))
    # The product is exact in float64; so is the sum of what layouts of weights make.
    return int(torch.tensor(a * b + c, dtype=torch.float64).to(torch.bfloat16).view(torch.int16)) & 0xFFFF


PAIRS = {"fma.rn.bf16x2": fused, "sub.rn.f16x2": difference}
