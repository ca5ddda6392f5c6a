"""Parallel mixers in one block, such as the two of Falcon-H1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

from torch import nn

from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Addend, Normed
from weft.models.layers.linear import JointLinear, Linear, SummedLinear, parent_of
from weft.models.model import Layer, ProjectedMixer, Source, sources


class Parallel(Layer):
    """Sum of mixers that read the same norm, each times its factor.

    One matmul projects for all of them, and another sums their outputs, which lie side by side. In between they run
    concurrently where the device supports that. In the checkpoint the mixers are siblings of this module.
    """

    def __init__(self, mixers: dict[str, ProjectedMixer], factors: dict[str, float]) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict(mixers)
        inputs = {f"{name}.{mixer.projections[0]}": take(mixer, 0) for name, mixer in mixers.items()}
        outputs = {f"{name}.{mixer.projections[1]}": take(mixer, 1) for name, mixer in mixers.items()}
        # Widths divisible by large powers of two come first, so that every mixer's input starts at an aligned address.
        ordered = sorted(inputs.items(), key=lambda item: alignment(len(item[1].weight)), reverse=True)
        self.in_proj = JointLinear(dict(ordered))
        self.out_proj = SummedLinear(outputs, [factors[name] for name in mixers])
        self.places = [[name for name, _ in ordered].index(name) for name in inputs]

    def forward(self, x: Normed, rotation: Rotation | None, batch: Batch, views: tuple[View, ...]) -> Addend:
        parts = self.in_proj(x, batch).split_with_sizes(self.in_proj.sizes, -1)
        mixed, outputs = batch.operations.side_by_side(parts[0], self.out_proj.sizes)
        batch.operations.run_together(
            parts[0],
            *(
                partial(cast(ProjectedMixer, mixer).mix, parts[place], rotation, batch, views, out)
                for mixer, place, out in zip(self.mixers.values(), self.places, outputs, strict=True)
            ),
        )
        return self.out_proj.forward(mixed, batch)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        around = parent_of(prefix)
        for name, mixer in self.mixers.items():
            yield from sources(mixer, f"{around}{name}.")
        yield from self.in_proj.checkpoint_sources(f"{around}in_proj.")
        yield from self.out_proj.checkpoint_sources(f"{around}out_proj.")


def take(mixer: ProjectedMixer, which: int) -> Linear:
    """Take a projection out of a mixer, which afterwards is only called through `mix`."""
    name = mixer.projections[which]
    linear: Linear = getattr(mixer, name)
    setattr(mixer, name, None)
    return linear


def alignment(width: int) -> int:
    """Return the largest power of two that divides a width.

    >>> alignment(96), alignment(24)
    (32, 8)
    """
    return width & -width
