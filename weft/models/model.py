"""What every family has in common: the parts of a network and how its checkpoint names map to them.

A family builds modules out of `layers/`, lists its mixers in order, and each mixer declares what it must remember.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch, Operations
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Addend, Normed
from weft.memory.device.store import View
from weft.memory.spec import Memory


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the part of a parameter that it fills (a view, possibly transposed).

    `transform` makes the target's values of the checkpoint's tensor (and of its `companions`, if it has any): a factor
    folded into a weight, rows in another order, a decay rate out of its logarithm. `shape` is the checkpoint's where it
    is not the target's; what comes is then reshaped or, if it is smaller, repeated.
    """

    name: str
    target: Tensor
    transform: Callable[..., Tensor] | None = None
    shape: tuple[int, ...] | None = None
    companions: tuple[str, ...] = ()
    # The tensor and its companions are concatenated; where they are cut is the checkpoint's affair.
    concatenated: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.target.shape) if self.shape is None else self.shape


class Layer(nn.Module):
    """A module without hooks, which nn.Module looks for at every call."""

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self.forward(*inputs, **more)


class Mixer(Layer):
    """A layer that looks at earlier tokens, and therefore remembers. `index` is its place among the model's mixers."""

    index: int

    def memory(self, operations: Operations) -> Memory:
        """Return what the layer remembers, laid out as these operations read it."""
        raise NotImplementedError

    def forward(self, x: Normed, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> Addend:
        raise NotImplementedError

    def warm(self, operations: Operations) -> None:
        """Prepare, before the first step, whatever would make a step wait."""


class ProjectedMixer(Mixer):
    """A mixer between two projections, which `Parallel` may join with those of others.

    `projections` names them: that of the input, and that into the stream.
    """

    projections: ClassVar[tuple[str, str]] = ("in_proj", "out_proj")

    def forward(self, x: Normed, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> Addend:
        before, after = (getattr(self, name) for name in self.projections)
        return after(self.mix(before(x, batch), rotation, batch, views), batch)

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
    """Tokens in, final hidden states out; `logits` turns some of those into scores over the vocabulary.

    A family is constructed from its configuration and the dtype of its activations, inside `weights.build`, which sets
    torch's default dtype and device: parameters are born with them unless they name their own.
    """

    vocab_size: int
    # Regular expressions on checkpoint names: (pattern, replacement), applied in order; and names that are not needed.
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = (r"\.rotary_emb\.inv_freq$",)
    # Encodings of weights that the family can read, by `quant_method`.
    quantisations: ClassVar[tuple[str, ...]] = ()

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head too."""
        raise NotImplementedError

    def untie(self) -> None:
        """Give a tied model a head of its own, to be filled."""
        raise NotImplementedError

    def mixers(self) -> list[Mixer]:
        """All mixers in order of construction; numbered on the way."""
        found = [m for m in self.modules() if isinstance(m, Mixer)]
        for index, mixer in enumerate(found):
            mixer.index = index
        return found

    def memories(self, operations: Operations) -> tuple[Memory, ...]:
        """Return what all mixers remember, laid out as these operations read it."""
        return tuple(mixer.memory(operations) for mixer in self.mixers())

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        raise NotImplementedError


def pin(model: nn.Module) -> None:
    """Once filled: parameters and parts as plain attributes, which nn.Module otherwise finds by a detour each time."""
    for module in model.modules():
        vars(module).update(module._parameters | module._modules)


def sources(module: nn.Module, prefix: str = "") -> Iterator[Source]:
    """Every checkpoint tensor that `module` can be filled from.

    A module whose parameters are stored under other names, or in pieces, says so in `checkpoint_sources(prefix)`, where
    `prefix` is its own path with a trailing dot. The same element may be offered under alternative names.
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
