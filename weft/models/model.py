"""What every family has in common: the parts of a network and how its checkpoint names map to them.

A family builds modules out of `layers/`, lists its mixers in order, and each mixer declares what it must remember.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.batch import Batch
from weft.memory.device.store import View
from weft.memory.spec import Memory


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the part of a parameter that it fills (a view, possibly transposed).

    `transform` is applied to the checkpoint's tensor before it is copied and keeps its shape: a factor folded into a
    weight, rows in another order, a decay rate out of its logarithm.
    """

    name: str
    target: Tensor
    transform: Callable[[Tensor], Tensor] | None = None


class Mixer(nn.Module):
    """A layer that looks at earlier tokens, and therefore remembers. `index` is its place among the model's mixers."""

    memory: Memory
    index: int


class CausalModel(nn.Module):
    """Tokens in, final hidden states out; `logits` turns some of those into scores over the vocabulary."""

    vocab_size: int

    def mixers(self) -> list[Mixer]:
        """All mixers in order of construction; numbered on the way."""
        found = [m for m in self.modules() if isinstance(m, Mixer)]
        for index, mixer in enumerate(found):
            mixer.index = index
        return found

    def memories(self) -> tuple[Memory, ...]:
        return tuple(mixer.memory for mixer in self.mixers())

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        raise NotImplementedError


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
