"""What a few instructions of PTX compute, in Python: logic of 32 bits, and pairs of bfloat16."""

from __future__ import annotations

import operator
import re

import torch

LOGIC = {
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift,
}  # fmt: skip
WORD = 0xFFFFFFFF


def run_assembly(text: str, *words: int) -> int:
    """Return $0, of these instructions with $1 and whatever else they are given."""
    values = {f"${number}": word & WORD for number, word in enumerate(words, 1)}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for name, target, operands in re.findall(r"([a-z]\w*(?:\.\w+)+) ([$\w]+), ([^;]+);", text):
        given = [value(each) for each in re.split(r", *", operands)]
        if name == "mov.b32":
            [values[target]] = given
        elif name == "fma.rn.bf16x2":
            values[target] = sum(fused(*(each >> shift & 0xFFFF for each in given)) << shift for shift in (0, 16))
        else:
            operation, kind = name.split(".")
            assert kind == "b32"
            one, other = given
            values[target] = LOGIC[operation](one, other) & WORD
    return values["$0"]


def fused(one: int, other: int, added: int) -> int:
    """Return the bits of one * other + added, rounded once, of the bits of bfloat16."""
    a, b, c = (float(torch.tensor(bits << 16).int().view(torch.float32)) for bits in (one, other, added))
    # The product is exact in float64; so is the sum of what layouts of weights make.
    return int(torch.tensor(a * b + c, dtype=torch.float64).to(torch.bfloat16).view(torch.int16)) & 0xFFFF
