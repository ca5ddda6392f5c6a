"""Rigs of the state space recurrence whose memory is surrounded by NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernels.operations import GPU_ROWS, ssd, ssd_memory
from tests.support.kernels.plans import Known, Rig
from tests.support.kernels.ssd import by_group, naive_ssd
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cpu.ssd import time_step
from weft.kernels.recurrent import UNLIMITED


def make_rig(
    lengths, heads=4, head_dim=5, state=16, groups=2, skip=True, seed=0, dt_scale=0.3, raw=False,
    dtype=torch.float32, device="cpu", limit=UNLIMITED, operations=GPU_ROWS, **options,
) -> Rig:  # fmt: skip
    torch.manual_seed(seed)
    A = -torch.rand(heads) * 2 - 0.05
    D = torch.randn(heads) if skip else None
    bias = torch.randn(heads) if raw else None
    sequences = []
    for n in lengths:
        x = torch.randn(n, heads, head_dim).to(dtype)
        B, C = ((torch.randn(n, groups, state) * state**-0.5).to(dtype) for _ in range(2))
        dt = torch.randn(n, heads).to(dtype) * 4 if raw else torch.rand(n, heads) * dt_scale
        y, states = naive_ssd(x, time_step(dt, bias, limit) if raw else dt, A, B, C, D)
        sequences.append(Known((x, dt, B, C), (y,), {"ssm": by_group(states, groups)}))
    on_device = [None if parameter is None else parameter.to(device) for parameter in (A, D, bias)]

    def call(
        inputs: tuple[Tensor, ...], batch, view, gate: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        dt = inputs[1]
        x, B, C = (surrounded_by_nan(inputs[number]) for number in (0, 2, 3))
        A, D, bias = on_device
        return (ssd(x, dt, A, B, C, D, batch, view, bias, limit, gate, out),)

    name = str(dtype).removeprefix("torch.")
    memory = ssd_memory(heads, head_dim, state, groups, 1, 2, name, by=operations)
    return Rig(memory, sequences, call, seed=seed, operations=operations, device=device, **options)


def surrounded_by_nan(tensor: Tensor) -> Tensor:
    """The same numbers as a slice of something wider, as a projection's are; what is read beside them shows."""
    flat = tensor.flatten(1)
    wide = torch.full((len(flat), flat.shape[1] + 64), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[:, 32:-32] = flat
    return wide[:, 32:-32].unflatten(1, tensor.shape[1:])


# Rows that end in a cell, at its end and behind it; decodes beside longer rows, that close a cell, and alone.
SHORT_STEPS = ([(0, 15), (1, 17), (2, 1)], [(0, 1), (1, 1), (2, 2)], [(0, 1), (1, 1)])
SHORT_LENGTHS = [17, 19, 3]
