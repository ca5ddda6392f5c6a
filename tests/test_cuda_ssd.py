"""The state space kernels of a GPU: small and odd on Triton's interpreter, real sizes on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compiled import assert_compiles
from tests.plans import Known, Rig, Row, make_plan
from tests.test_ssd import by_group, naive_ssd
from weft.kernels.ssd import UNLIMITED, ssd, ssd_memory, time_step
from weft.memory.device.store import Store
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch


def make_rig(
    lengths, heads=4, head_dim=5, state=6, groups=2, skip=True, seed=0, dt_scale=0.3, raw=False,
    dtype=torch.float32, device="cpu", limit=UNLIMITED, **options,
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

    def call(inputs: tuple[Tensor, ...], batch, view) -> tuple[Tensor, ...]:
        x, dt, B, C = inputs
        A, D, bias = on_device
        return (ssd(x, dt, A, B, C, D, batch, view, bias, limit),)

    name = str(dtype).removeprefix("torch.")
    memory = ssd_memory(heads, head_dim, state, groups, 1, 2, name, lanes=True)
    return Rig(memory, sequences, call, seed=seed, lanes=True, device=device, **options)


@pytest.mark.parametrize(("groups", "room"), [(1, 0), (2, 3), (4, 0)])
def test_packed_rows_of_any_length_equal_the_loop(groups, room):
    rig = make_rig([50, 33, 16, 7, 1, 65], groups=groups, room=room, cell=16)
    rig.run([1, 1, 2, 3, 5, 16, 17, 40])


# heads, head_dim, state, groups of public models.
NEMOTRON_NANO = (128, 80, 128, 8)
GRANITE_SMALL = (128, 64, 128, 1)
FALCON_7B = (24, 128, 256, 1)


def launch_all() -> None:
    for sizes in (NEMOTRON_NANO, GRANITE_SMALL, FALCON_7B):
        launch(torch.bfloat16, *sizes)
    launch(torch.float32, *NEMOTRON_NANO)


def launch(dtype: torch.dtype, heads: int, head_dim: int, state: int, groups: int) -> None:
    name = str(dtype).removeprefix("torch.")
    spec = MemorySpec((ssd_memory(heads, head_dim, state, groups, 1, 2, name, lanes=True),))
    view = Store(spec, 2 * max(spec.state_bytes, spec.tail_bytes)).views[0]
    plan = make_plan([Row(70, 71), *(Row(70, 71) for _ in range(99)), Row(3, 300)])
    batch = build_batch(plan, spec, torch.zeros(1, dtype=torch.int64), "cpu", lanes=True)
    tokens = batch.tokens
    mixed = torch.empty(tokens, heads * head_dim + 2 * groups * state, dtype=dtype)
    x, B, C = mixed.split_with_sizes([heads * head_dim, groups * state, groups * state], 1)
    A, D, bias = torch.empty(3, heads)
    ssd(
        x.view(-1, heads, head_dim), torch.empty(tokens, heads, dtype=dtype), A, B.view(-1, groups, state),
        C.view(-1, groups, state), D, batch, view, bias,
    )  # fmt: skip


def test_kernels_compile_for_sm_90():
    assert_compiles(launch_all)
