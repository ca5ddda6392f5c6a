"""MLPs: they process each token separately."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activations import gelu_tanh, squared_relu
from weft.kernels.interface import Batch
from weft.kernels.stream import Addend, Normed
from weft.models.layers.linear import Linear, OutputLinear, PackedLinear, SummandLinear
from weft.models.model import Layer
from weft.models.sharding import current_shard, side_by_side

# By their names in configurations (`hidden_act`).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": squared_relu,
}


class GatedMLP(Layer):
    """MLP that computes down(activation(gate(x)) * up(x)); gate and up are one matmul.

    `names` are the checkpoint's names of gate and up, or of one matrix that holds both.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str = "silu",
        bias: bool = False,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__()
        cut = current_shard().cut(inner, "MLP channels")
        both = side_by_side(*[cut] * (2 // len(names)))
        self.gate_up = PackedLinear(hidden, dict.fromkeys(names, both), bias)
        self.down_proj = OutputLinear(cut, hidden, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Normed, batch: Batch) -> Addend:
        return self.down_proj.forward(self.gate_up.activated(x, self.activation, batch, parts=2), batch)


class PlainMLP(Layer):
    """Nemotron-H's MLP: down(activation(up(x))). With `into_stream`, the output may be partial sums."""

    def __init__(
        self, hidden: int, inner: int, activation: str = "relu2", bias: bool = False, into_stream: bool = True
    ) -> None:
        super().__init__()
        cut = current_shard().cut(inner, "MLP channels")
        self.up_proj = Linear(hidden, cut, bias)
        self.down_proj = (OutputLinear if into_stream else SummandLinear)(cut, hidden, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Normed, batch: Batch) -> Addend:
        return self.down_proj.forward(self.up_proj.activated(x, self.activation, batch), batch)
