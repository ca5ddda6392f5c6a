"""Linear layers: single, or several of the checkpoint's in one matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch, Operations
from weft.kernels.stream import Addend, Normed
from weft.kernels.weight import Weight
from weft.models.dummy import fill
from weft.models.model import MatrixLayer, Source, declared, sources
from weft.models.sharding import RankCut, Shard, current_shard


def parent_of(prefix: str) -> str:
    """Return the path of a module's parent, with a trailing dot: the prefix of its siblings in the checkpoint.

    >>> parent_of("layers.0.self_attn.qkv."), parent_of("qkv.")
    ('layers.0.self_attn.', '')
    """
    parent = prefix.rstrip(".").rpartition(".")[0]
    return parent + "." if parent else ""


class Linear(MatrixLayer):
    """A matmul. A rank may hold a part of its outputs or of its inputs; in the second case it returns a summand."""

    # Whether the results of all ranks are added up: one of them then has the bias.
    summed = False

    def __init__(self, inputs: int | RankCut, outputs: int | RankCut, bias: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs = RankCut.whole(inputs), RankCut.whole(outputs)
        self.weight = declared(self.outputs.kept, self.inputs.kept)
        self.bias = nn.Parameter(torch.empty(self.outputs.kept), requires_grad=False) if bias else None
        self.bias_of = only_once(current_shard()) if self.summed else None
        # The weights as operations read them, once filled.
        self.prepared: Weight | None = None

    @property
    def weights(self) -> Weight:
        return Weight(self.parts_of("weight"), self.bias) if self.prepared is None else self.prepared

    def forward(self, x: Normed, batch: Batch) -> Float[Tensor, "*n outputs"]:
        return batch.operations.linear(x, self.weights)

    def activated(self, x: Normed, activation: Callable[[Tensor], Tensor], batch: Batch, parts: int = 1) -> Normed:
        """Return activation(output); if the output is two adjacent parts, activation(first) * second."""
        return batch.operations.activated_linear(x, self.weights, activation, parts)

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        """Convert the filled weights to the fastest formats of these operations; `twice`: also to one for few rows."""
        self.prepared = operations.prepare(Weight(self.parts_of("weight"), self.bias), twice)
        self.store("weight", self.prepared.parts)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield self.part_of_weight(prefix + "weight", self.weight, self.outputs)
        if self.bias is not None:
            yield Source(prefix + "bias", self.bias, self.bias_of, cut=self.outputs)

    def part_of_weight(self, name: str, target: Tensor, rows: RankCut) -> Source:
        """Return the source of some rows of the weight, or of this rank's columns of them."""
        cut, dim = (rows, 0) if self.inputs.is_whole else (self.inputs, 1)
        return Source(name, target, cut=cut, dim=dim)


def only_once(shard: Shard) -> Callable[[Tensor], Tensor] | None:
    """Return the transform of a bias that only the first rank adds."""
    return None if shard.is_first else torch.zeros_like


class SummandLinear(Linear):
    """A projection whose results on all ranks are summands of one."""

    summed = True


class OutputLinear(SummandLinear):
    """Last projection of a block's mixer or MLP: its output goes only into the residual stream."""

    def forward(self, x: Normed, batch: Batch) -> Addend:
        return batch.operations.linear_into_stream(x, self.weights)


class PackedLinear(Linear):
    """Matrices with the same input, as one matmul: `parts` maps their checkpoint names to their outputs.

    The names are siblings of this module: `qkv = PackedLinear(h, {"q_proj": 8, "k_proj": 4, "v_proj": 4})` inside
    `self_attn` is filled from `self_attn.q_proj.weight` and so on.
    """

    def __init__(self, inputs: int | RankCut, parts: Mapping[str, int | RankCut], bias: bool = False) -> None:
        cuts = {name: RankCut.whole(outputs) for name, outputs in parts.items()}
        super().__init__(inputs, sum(cut.kept for cut in cuts.values()), bias)
        self.cuts = cuts
        self.parts = {name: cut.kept for name, cut in cuts.items()}

    def split(self, x: Normed, batch: Batch) -> tuple[Tensor, ...]:
        return self.forward(x, batch).split_with_sizes(list(self.parts.values()), dim=-1)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        siblings = parent_of(prefix)
        first = 0
        for name, outputs in self.parts.items():
            cut = self.cuts[name]
            yield self.part_of_weight(f"{siblings}{name}.weight", self.weight[first : first + outputs], cut)
            if self.bias is not None:
                yield Source(f"{siblings}{name}.bias", self.bias[first : first + outputs], cut=cut)
            first += outputs


class JointLinear(Linear):
    """Linear layers with the same input, as one matmul. Each keeps its checkpoint names and fills its own rows.

    `parts` maps the paths of the layers, relative to this module's parent, to them.
    """

    def __init__(self, parts: dict[str, Linear]) -> None:
        sizes = [len(part.weight) for part in parts.values()]
        inputs = next(iter(parts.values())).weight.shape[1]
        super().__init__(inputs, sum(sizes), any(part.bias is not None for part in parts.values()))
        self.sizes = sizes
        self.parts = parts
        rows = self.weight.split(self.sizes)
        biases = rows if self.bias is None else self.bias.zero_().split(self.sizes)
        for part, weight, bias in zip(parts.values(), rows, biases, strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)
            if part.bias is not None:
                part.bias = nn.Parameter(bias, requires_grad=False)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        for name, part in self.parts.items():
            yield from sources(part, f"{parent_of(prefix)}{name}.")

    def initialise(self, generator: torch.Generator) -> None:
        for part, weight in zip(self.parts.values(), self.weight.split(self.sizes), strict=True):
            fill("weight", weight, generator)
            if part.bias is not None:
                fill("bias", part.bias, generator)

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        super().prepare(operations, twice)
        # Their rows are in the checkpoint's layout, which is no longer needed.
        self.parts = {}


class SummedLinear(OutputLinear):
    """Sum of linear layers, each times a factor, as one matmul over their concatenated inputs.

    `parts` maps the paths of the layers, relative to this module's parent, to them. Factors are folded into the
    weights.
    """

    def __init__(self, parts: dict[str, Linear], factors: list[float]) -> None:
        sizes = [part.weight.shape[1] for part in parts.values()]
        outputs = len(next(iter(parts.values())).weight)
        super().__init__(sum(sizes), outputs, any(part.bias is not None for part in parts.values()))
        self.sizes = sizes
        self.columns = {name: part.inputs for name, part in parts.items()}
        self.factors = dict(zip(parts, factors, strict=True))
        self.biased = [name for name, part in parts.items() if part.bias is not None]

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        around = parent_of(prefix)
        columns = self.weight.split(self.sizes, 1)
        for (name, factor), target in zip(self.factors.items(), columns, strict=True):
            yield Source(f"{around}{name}.weight", target, factor=factor, cut=self.columns[name], dim=1)
        if self.bias is not None:
            first, *others = (f"{around}{name}.bias" for name in self.biased)
            once = 1.0 if self.bias_of is None else 0.0
            add = partial(weighed_sum, factors=[once * self.factors[name] for name in self.biased])
            yield Source(first, self.bias, add, companions=tuple(others))


def weighed_sum(*stored: Tensor, factors: list[float]) -> Tensor:
    """Return the sum of tensors times their factors, in float32.

    >>> weighed_sum(torch.ones(2), torch.ones(2), factors=[2.0, 0.5])
    tensor([2.5000, 2.5000])
    """
    return sum((tensor.float() * factor for tensor, factor in zip(stored, factors, strict=True)), torch.zeros(()))
