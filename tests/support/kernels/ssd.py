"""The state space recurrence as a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernels.causal_conv import naive_conv
from tests.support.kernels.operations import CPU, causal_conv, ssd, ssd_memory
from tests.support.kernels.plans import Known, Rig

HEADS, HEAD_DIM, STATE, CHANNELS, WIDTH = 4, 5, 6, 3, 4


def naive_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs token by token, and the state after every number of tokens read: [heads, state, head_dim]."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    share = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(share, 1), C.repeat_interleave(share, 1)
    state = torch.zeros(x.shape[1], B.shape[2], x.shape[2], dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(x)):
        state = state * torch.exp(dt[t] * A)[:, None, None] + B[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
        outputs.append((C[t][:, :, None] * state).sum(1) + (0 if D is None else D.double()[:, None] * x[t]))
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


def by_group(states: Tensor, groups: int) -> Tensor:
    """States as they lie in slots: [n, groups, state, heads of a group * head_dim]."""
    return states.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)


def make_rig(lengths, groups=2, skip=True, dtype=torch.float32, seed=0, dt_scale=0.3, state=STATE, **options) -> Rig:
    torch.manual_seed(seed)
    A = -torch.rand(HEADS) * 2 - 0.05
    D = torch.randn(HEADS) if skip else None
    weight = torch.randn(CHANNELS, WIDTH)
    sequences = []
    for n in lengths:
        x, line = torch.randn(n, HEADS, HEAD_DIM).to(dtype), torch.randn(n, CHANNELS)
        B, C = (torch.randn(n, groups, state).to(dtype) * state**-0.5 for _ in range(2))
        dt = torch.rand(n, HEADS) * dt_scale
        y, states = naive_ssd(x, dt, A, B, C, D)
        convolved, windows = naive_conv(line, weight, None, False)
        known = {"ssm": by_group(states, groups), "conv": windows}
        sequences.append(Known((x, dt, B, C, line), (y, convolved), known))

    def call(inputs, batch, view):
        x, dt, B, C, line = inputs
        return ssd(x, dt, A, B, C, D, batch, view), causal_conv(line, weight, None, False, batch, view)

    memory = ssd_memory(HEADS, HEAD_DIM, state, groups, CHANNELS, WIDTH, "float32", by=options.get("operations", CPU))
    return Rig(memory, sequences, call, seed=seed, **options)
