"""Causal convolution as a loop over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels.operations import causal_conv
from tests.support.kernels.plans import Known, Rig
from weft.kernels.recurrent import short_conv_memory

CHANNELS = 6


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool) -> tuple[Tensor, Tensor]:
    """Outputs token by token, and the window after every number of tokens read."""
    width = weight.shape[1]
    window = torch.zeros(width - 1, x.shape[1], dtype=x.dtype)
    outputs, windows = [], [window]
    for token in x:
        line = torch.cat((window, token[None]))
        y = sum(line[tap].double() * weight[:, tap].double() for tap in range(width))
        y = y if bias is None else y + bias.double()
        outputs.append(F.silu(y) if activation else y)
        window = line[1:]
        windows.append(window)
    return torch.stack(outputs).to(x.dtype), torch.stack(windows)


def make_rig(lengths, width=4, bias=True, activation=True, dtype=torch.float32, seed=0, **options) -> Rig:
    torch.manual_seed(seed)
    weight = torch.randn(CHANNELS, width, dtype=dtype) * width**-0.5
    offset = torch.randn(CHANNELS, dtype=dtype) if bias else None
    sequences = []
    for length in lengths:
        x = torch.randn(length, CHANNELS, dtype=dtype)
        y, windows = naive_conv(x, weight, offset, activation)
        sequences.append(Known((x,), (y,), {"conv": windows}))

    def call(inputs, batch, view):
        return (causal_conv(inputs[0], weight, offset, activation, batch, view),)

    memory = short_conv_memory(CHANNELS, width, str(dtype).removeprefix("torch."))
    return Rig(memory, sequences, call, seed=seed, **options)
