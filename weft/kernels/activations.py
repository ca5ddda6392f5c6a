"""Activation functions, and their names in compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Function: TypeAlias = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


NAMES: dict[Function, str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    F.relu: "relu",
    squared_relu: "relu2",
    torch.sigmoid: "sigmoid",
}
