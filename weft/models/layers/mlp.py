"""The part of a block that looks at one token only."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activation import gelu_tanh, squared_relu
from weft.kernels.norm import LazyNorm
from weft.models.layers.linear import Linear, PackedLinear
from weft.models.model import Layer

# By the names that configurations give them (`hidden_act`).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": squared_relu,
}


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)); gate and up are one product. `names` are those of the checkpoint."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str = "silu",
        bias: bool = False,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__()
        self.gate_up = PackedLinear(hidden, dict.fromkeys(names, inner), bias)
        self.down_proj = Linear(inner, hidden, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "n hidden"] | LazyNorm) -> Float[Tensor, "*parts n hidden"]:
        return self.down_proj.unsummed(self.gate_up.activated(x, self.activation, parts=2))


class PlainMLP(Layer):
    """down(activation(up(x))): Nemotron-H."""

    def __init__(self, hidden: int, inner: int, activation: str = "relu2", bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "n hidden"] | LazyNorm) -> Float[Tensor, "*parts n hidden"]:
        return self.down_proj.unsummed(self.up_proj.activated(x, self.activation))

    def summed(self, x: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        """For whom a product in parts is no use."""
        return self.down_proj(self.up_proj.activated(x, self.activation))
