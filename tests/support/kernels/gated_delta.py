"""The gated delta rule as a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernels.causal_conv import naive_conv
from tests.support.kernels.operations import CPU, causal_conv, gated_delta, gated_delta_memory
from tests.support.kernels.plans import Known, Rig

KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 6, 5, 3, 4


def naive_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs token by token, and the state after every number of tokens read: [value heads, key_dim, value_dim]."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    share = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (q * q.shape[-1] ** -0.5).repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        correction = beta[t][:, None] * (v[t] - (k[t][:, :, None] * state).sum(1))
        state = state + k[t][:, :, None] * correction[:, None]
        outputs.append((q[t][:, :, None] * state).sum(1))
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


def make_rig(lengths, key_heads=2, value_heads=4, dtype=torch.float32, seed=0, decay=0.3, **options) -> Rig:
    torch.manual_seed(seed)
    weight = torch.randn(CHANNELS, WIDTH)
    sequences = []
    for n in lengths:
        q, k = (torch.randn(n, key_heads, KEY_DIM).to(dtype) for _ in range(2))
        v, line = torch.randn(n, value_heads, VALUE_DIM).to(dtype), torch.randn(n, CHANNELS)
        g, beta = -torch.rand(n, value_heads) * decay, torch.rand(n, value_heads).to(dtype)
        y, states = naive_delta(q, k, v, g, beta)
        convolved, windows = naive_conv(line, weight, None, False)
        sequences.append(Known((q, k, v, g, beta, line), (y, convolved), {"delta": states, "conv": windows}))

    def call(inputs, batch, view):
        *own, line = inputs
        return gated_delta(*own, batch, view), causal_conv(line, weight, None, False, batch, view)

    memory = gated_delta_memory(
        key_heads, KEY_DIM, value_heads, VALUE_DIM, CHANNELS, WIDTH, "float32", by=options.get("operations", CPU)
    )
    return Rig(memory, sequences, call, seed=seed, **options)
