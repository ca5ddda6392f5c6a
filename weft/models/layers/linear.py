"""Matrix products, alone or several of the checkpoint's in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.linear import activated_linear, for_few_rows, linear, pack, unsummed_linear
from weft.kernels.norm import LazyNorm
from weft.models.model import Layer, Source


def parent_of(prefix: str) -> str:
    """The path around a module, with a trailing dot: where its siblings in the checkpoint are.

    >>> parent_of("layers.0.self_attn.qkv."), parent_of("qkv.")
    ('layers.0.self_attn.', '')
    """
    parent = prefix.rstrip(".").rpartition(".")[0]
    return parent + "." if parent else ""


class Linear(Layer):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        # The weights once more, as few rows read them fastest.
        self.stored: Tensor | None = None

    def forward(self, x: Float[Tensor, "*n inputs"] | LazyNorm) -> Float[Tensor, "*n outputs"]:
        return linear(x, self.weight, self.bias, self.stored)

    def unsummed(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "*parts n outputs"]:
        """The product as a residual stream takes it: possibly in parts that are still to be added up."""
        return unsummed_linear(x, self.weight, self.bias, self.stored)

    def activated(
        self, x: Float[Tensor, "n inputs"] | LazyNorm, activation: Callable[[Tensor], Tensor], parts: int = 1
    ) -> Float[Tensor, "n results"]:
        """The activation of the product; of two parts side by side, that of the first times the second."""
        return activated_linear(x, self.weight, self.bias, activation, parts, self.stored)

    def pack(self, twice: bool = False) -> None:
        """Once filled: the weights in the layout that many rows are fastest with; `twice`: in one for few rows, too."""
        self.stored = for_few_rows(self.weight) if twice else None
        self.weight = nn.Parameter(pack(self.weight), requires_grad=False)


class PackedLinear(Linear):
    """Matrices that read the same input, as one product: `parts` maps their names in the checkpoint to their outputs.

    The names are siblings of this module: `qkv = PackedLinear(h, {"q_proj": 8, "k_proj": 4, "v_proj": 4})` inside
    `self_attn` is filled from `self_attn.q_proj.weight` and so on.
    """

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = parts

    def split(self, x: Float[Tensor, "*n inputs"] | LazyNorm) -> tuple[Tensor, ...]:
        return self(x).split(list(self.parts.values()), dim=-1)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        first = 0
        for name, outputs in self.parts.items():
            yield Source(f"{siblings}{name}.weight", self.weight[first : first + outputs])
            if self.bias is not None:
                yield Source(f"{siblings}{name}.bias", self.bias[first : first + outputs])
            first += outputs


@dataclass(frozen=True, slots=True)
class Addend:
    """A matrix whose product is added to others', times `factor`, as is its bias if it has one."""

    inputs: int
    factor: float = 1.0
    bias: bool = False


class JoinedLinear(Linear):
    """The sum of products, as one with inputs side by side: `addends` maps their names in the checkpoint to them.

    As with `PackedLinear`, the names are siblings of this module. Factors are folded into the weights.
    """

    def __init__(self, addends: dict[str, Addend], outputs: int) -> None:
        biased = any(addend.bias for addend in addends.values())
        super().__init__(sum(addend.inputs for addend in addends.values()), outputs, biased)
        self.addends = addends

    @property
    def sizes(self) -> list[int]:
        """Of the inputs of each."""
        return [addend.inputs for addend in self.addends.values()]

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        columns = self.weight.split(self.sizes, 1)
        for (name, addend), target in zip(self.addends.items(), columns, strict=True):
            yield Source(f"{siblings}{name}.weight", target, partial(weighed_sum, factors=[addend.factor]))
        if self.bias is not None:
            biases = {f"{siblings}{name}.bias": a.factor for name, a in self.addends.items() if a.bias}
            first, *others = biases
            add = partial(weighed_sum, factors=list(biases.values()))
            yield Source(first, self.bias, add, companions=tuple(others))


def weighed_sum(*stored: Tensor, factors: list[float]) -> Tensor:
    """
    >>> weighed_sum(torch.ones(2), torch.ones(2), factors=[2.0, 0.5])
    tensor([2.5000, 2.5000])
    """
    return sum((tensor.float() * factor for tensor, factor in zip(stored, factors, strict=True)), torch.zeros(()))
