"""The delta rule with decays by channel as a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernels.operations import CPU
from tests.support.kernels.plans import Known, Rig
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape


def naive_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs token by token, and the state after every number of tokens read: [heads, key_dim, value_dim]."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(v)):
        state = state * g[t].exp()[:, :, None]
        correction = beta[t][:, None] * (v[t] - (k[t][:, :, None] * state).sum(1))
        state = state + k[t][:, :, None] * correction[:, None]
        outputs.append((q[t][:, :, None] * state).sum(1) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


def random_inputs(tokens: int, sizes, dtype=torch.float32, decay=0.3) -> tuple[Tensor, ...]:
    heads, key_dim, value_dim = sizes
    q, k, g = torch.randn(3, tokens, heads, key_dim)
    v, beta = torch.randn(tokens, heads, value_dim), torch.rand(tokens, heads)
    return tuple(x.to(dtype) for x in (q, k, v, -torch.rand_like(g) * decay, beta))


def make_rig(lengths, sizes=(2, 6, 5), dtype=torch.float32, seed=0, decay=0.3, operations=CPU, **options) -> Rig:
    torch.manual_seed(seed)
    sequences = []
    for n in lengths:
        inputs = random_inputs(n, sizes, dtype, decay)
        y, states = naive_delta(*inputs)
        sequences.append(Known(inputs, (y,), {"channel_delta": states}))

    def call(inputs, batch, view):
        return (batch.operations.channel_delta(ChannelDeltaInputs(*inputs), batch, view),)

    memory = operations.channel_delta_memory(ChannelDeltaShape(*sizes, 3, 4), str(dtype).removeprefix("torch."))
    return Rig(memory, sequences, call, seed=seed, operations=operations, **options)
