"""Base of all families: the parts of a network, and the mapping of checkpoint names to them.

A family builds modules from `layers/` and lists its mixers in order. Each mixer declares its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.device.store import View
from weft.kernels.formats.stored import Stored
from weft.kernels.interface import Batch, Operations
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Addend, Normed
from weft.memory.spec import Memory
from weft.models.held import WeightFacts
from weft.models.sharding import ALONE, RankCut, Shard


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the part of a parameter that it fills (a view, possibly transposed).

    `transform` computes the target's values from the checkpoint's tensor (and its `companions`, if any), such as a
    decay rate from its logarithm. Matrices may be stored in any format, so they have none: `order` puts their outputs
    into another order, or chooses some of them, and `factor` is folded into them. `shape` is the checkpoint's if it
    differs from the target's; the tensor is then reshaped or, if it is smaller, repeated.

    `cut` is the part of dimension `dim` of every stored tensor that this rank reads, before the transform; of
    concatenated tensors, it is a part of the result. Target and `shape` are this rank's.
    """

    name: str
    target: Tensor
    transform: Callable[..., Tensor] | None = None
    shape: tuple[int, ...] | None = None
    companions: tuple[str, ...] = ()
    # The tensor and its companions are concatenated; the checkpoint decides where they are cut.
    concatenated: bool = False
    cut: RankCut | None = None
    dim: int = 0
    # A function of tensors whose first dimension is outputs; `output_dim` is that dimension of the target.
    order: Callable[[Tensor], Tensor] | None = None
    output_dim: int = 0
    # For all outputs, or for each.
    factor: float | list[float] | None = None
    # Plain numbers are stored as [inputs, outputs]; other formats never are.
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = tuple(self.target.shape) if self.shape is None else self.shape
        return shape if self.cut is None else (*shape[: self.dim], self.cut.size, *shape[self.dim + 1 :])


class Layer(nn.Module):
    """A module that skips nn.Module's search for hooks at every call."""

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self.forward(*inputs, **more)


class MatrixLayer(Layer):
    """A layer with matrices, which are declared with their sizes and stored in the format of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, tuple[Stored, ...]] = {}

    def parts_of(self, name: str) -> tuple[Stored, ...]:
        """Return a matrix as it is stored: parts of adjacent outputs, each in a format of its own."""
        return self._parts.get(name) or (Stored.of(getattr(self, name)),)

    def matrix_names(self) -> list[str]:
        """Return the names of this layer's matrices."""
        plain = [
            name for name, each in self._parameters.items() if each is not None and each.ndim > 1 and "." not in name
        ]
        return sorted({*plain, *self._parts})

    def stored_parts(self) -> Iterator[Stored]:
        """Return all parts of matrices that are more than one tensor of plain numbers."""
        for parts in self._parts.values():
            yield from parts

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        """Convert the filled matrices to the fastest formats of these operations; `twice`: also to one for few rows."""
        raise NotImplementedError

    def store(self, name: str, parts: tuple[Stored, ...]) -> None:
        """Keep a matrix in these parts. A single tensor is the parameter `name`, several have numbers after it."""
        for old in [each for each in self._parameters if each == name or each.startswith(f"{name}.")]:
            del self._parameters[old]
        self._parts[name] = parts
        tensors = [tensor for part in parts for tensor in part.tensors]
        for number, tensor in enumerate(tensors):
            own = name if len(tensors) == 1 else f"{name}.{number}"
            held = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self._parameters[own] = held
        if parts[0].dense is not None and len(parts) == 1:
            del self._parts[name]


class Mixer(Layer):
    """A layer that reads earlier tokens, and therefore has memory. `index` is its place among the model's mixers."""

    index: int

    def memory(self, operations: Operations) -> Memory:
        """Return the layer's memory, in the layout that these operations read."""
        raise NotImplementedError

    def forward(self, x: Normed, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> Addend:
        raise NotImplementedError

    def warm(self, operations: Operations) -> None:
        """Prepare, before the first step, anything that would make a step wait."""

    def keep_pages_in(self, dtype: str) -> None:
        """Keep keys and values in a dtype other than the model's. Layers without any do nothing."""

    def keep_states_in(self, dtype: str) -> None:
        """Keep states of a recurrence in this dtype. Layers without any do nothing."""

    def prefix_members(self, operations: Operations) -> int | None:
        """Return how many decodes read a shared prefix together; None if the layer reads no whole prefix."""
        return None


class ProjectedMixer(Mixer):
    """A mixer between two projections, which `Parallel` may join with those of others.

    `projections` names them: the input projection, and the projection into the stream.
    """

    projections: ClassVar[tuple[str, str]] = ("in_proj", "out_proj")

    def forward(self, x: Normed, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> Addend:
        before, after = (getattr(self, name) for name in self.projections)
        mixed: Addend = after(self.mix(before(x, batch), rotation, batch, views), batch)
        return mixed

    def mix(
        self,
        projected: Float[Tensor, "tokens projected"],
        rotation: Rotation | None,
        batch: Batch,
        views: tuple[View, ...],
        out: Float[Tensor, "tokens inner"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        """Mix tokens. `projected` may be a slice of a wider matrix, and so may `out`, which is filled if given."""
        raise NotImplementedError


class CausalModel(Layer):
    """Language model: tokens in, final hidden states out; `logits` turns some of those into scores over the vocabulary.

    A family is constructed from its configuration and the dtype of its activations, inside `weights.build`, which
    sets torch's default dtype and device: parameters use them unless they name their own. It also sets the rank whose
    part of the model is built (`sharding.current_shard`).
    """

    vocab_size: int
    shard: Shard = ALONE
    # Of activations, and of weights that are stored as plain numbers.
    dtype: torch.dtype
    # Whether it has a head over the vocabulary.
    generates = True
    # Of the weights, if they are to be identified (`identity.py`).
    weights_digest: bytes = b""
    # What its weights take, once they are filled.
    held: WeightFacts
    # Regular expressions on checkpoint names: (pattern, replacement), applied in order; and names that are not needed.
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = (r"\.rotary_emb\.inv_freq$",)
    # Number of what the family computes. A change of the logits of any configuration raises it: then no engine reads
    # states that were stored before (`identity.py`). `tests/models/test_goldens.py` checks it.
    revision: ClassVar[int]

    @property
    def tied(self) -> bool:
        """Return whether the embedding is also the head."""
        raise NotImplementedError

    def untie(self) -> None:
        """Give a tied model a separate head, whose weights are not filled yet."""
        raise NotImplementedError

    def mixers(self) -> list[Mixer]:
        """Return all mixers in order of construction, after numbering them."""
        found = [m for m in self.modules() if isinstance(m, Mixer)]
        for index, mixer in enumerate(found):
            mixer.index = index
        return found

    def keep(self, pages: str = "auto", states: str = "float32") -> None:
        """Let all layers keep keys and values, and states, in these dtypes; raise if one cannot. "auto": in that of the
        model.
        """
        for mixer in self.mixers():
            mixer.keep_states_in(states)
            if pages != "auto":
                mixer.keep_pages_in(pages)

    def memories(self, operations: Operations) -> tuple[Memory, ...]:
        """Return the memory of all mixers, in the layout that these operations read."""
        return tuple(mixer.memory(operations) for mixer in self.mixers())

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        raise NotImplementedError

    def vectors(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n size"]:
        """Return what requests for vectors get of sums of final hidden states."""
        head = self.class_head
        return hidden if head is None else head(hidden.to(self.dtype), batch).float()

    @property
    def class_head(self) -> nn.Module | None:
        """The head over classes, if it has one, named as in checkpoints."""
        return self._modules.get("score")


def declared(*sizes: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a matrix of a layer. It takes no memory where a checkpoint is still to say how it is stored."""
    device = torch.device("meta") if _declaring.get() else None
    return nn.Parameter(torch.empty(*sizes, dtype=dtype, device=device), requires_grad=False)


_declaring: ContextVar[bool] = ContextVar("weft_declaring", default=False)


@contextmanager
def only_declaring(value: bool) -> Iterator[None]:
    """Build layers inside the context without memory for their matrices."""
    token = _declaring.set(value)
    try:
        yield
    finally:
        _declaring.reset(token)


def pin(model: nn.Module) -> None:
    """Make a filled model's parameters and parts plain attributes, which avoids nn.Module's slow lookup."""
    for module in model.modules():
        vars(module).update(module._parameters | module._modules)


def sources(module: nn.Module, prefix: str = "") -> Iterator[Source]:
    """Return every checkpoint tensor that `module` can be filled from.

    A module whose parameters are stored under other names, or in pieces, defines `checkpoint_sources(prefix)`, where
    `prefix` is its own path with a trailing dot. Alternative names may offer the same element.
    """
    own = getattr(module, "checkpoint_sources", None)
    if own is not None:
        yield from own(prefix)
        return
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name in module._non_persistent_buffers_set:
            continue
        yield Source(prefix + name, tensor)
    for name, child in module.named_children():
        yield from sources(child, f"{prefix}{name}.")
