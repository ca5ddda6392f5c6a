"""The product of one row with bfloat16 weights on a CPU, as fast as its memory gives them.

One row times a matrix is a weighted sum of the matrix's rows, which is what `embedding_bag` computes: FBGEMM's kernel
behind it widens, multiplies and adds in float32 and fetches ahead. Weights are laid out for it in a table of blocks: a
bag is a block of outputs, its entries are the inputs. Inputs are visited in several places of a block by turns: a core
that reads one place after the other gets a fifth less out of its memory, or worse.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Outputs of a block: 256 bytes of an input's weights lie side by side.
BLOCK = 128
# Places of a block that are read by turns.
PLACES = 8


def available() -> bool:
    """Whether this processor has the kernel; without it `embedding_bag` is slow."""
    engines = torch.backends.quantized.supported_engines
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and ("fbgemm" in engines or "x86" in engines)


def tabulate(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "blocks inputs block"]:
    """A copy of the weights as `multiply` reads them, filled up with zeros to whole blocks."""
    outputs, inputs = weight.shape
    table = weight.new_zeros(-(-outputs // BLOCK), inputs, BLOCK)
    for block, some in zip(table, weight.split(BLOCK)):
        block[:, : len(some)] = some.t()
    return table


def multiply(
    x: Float[Tensor, "1 inputs"], table: Float[Tensor, "blocks inputs block"], outputs: int
) -> Float[Tensor, "1 outputs"]:
    order, entries, bags = walk(table.shape[1], len(table))
    factors = x.index_select(1, order).expand(len(table), -1).reshape(-1)
    found = torch._embedding_bag_forward_only(table.view(-1, BLOCK), entries, bags, False, 0, False, factors)[0]
    return found.view(1, -1)[:, :outputs]


@cache
def walk(inputs: int, blocks: int) -> tuple[Int[Tensor, " inputs"], Int[Tensor, " entries"], Int[Tensor, " blocks"]]:
    """The order in which inputs are visited, the table's entries in that order, and where each bag of them begins."""
    length = -(-inputs // PLACES)
    order = torch.arange(length * PLACES).view(PLACES, length).t().flatten()
    order = order[order < inputs]
    entries = (torch.arange(blocks)[:, None] * inputs + order).flatten()
    return order, entries.int(), torch.arange(0, len(entries), inputs, dtype=torch.int32)
