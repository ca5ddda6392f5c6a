"""The kernels of the delta rule with decays by channel, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.channel_delta import make_rig as rig_of
from tests.support.kernels.channel_delta import random_inputs
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import GPU_ROWS
from tests.support.kernels.plans import Row, make_plan
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import Store
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch


def make_rig(lengths, **options):
    return rig_of(lengths, operations=GPU_ROWS, **options)


@pytest.mark.parametrize("room", [0, 3])
def test_packed_rows_of_any_length_equal_the_loop(room):
    make_rig([25, 16, 9, 1], room=room, seed=room).run([1, 3, 8, 9, 17])


def test_token_by_token_a_sequence_equals_the_loop():
    make_rig([17], sizes=(1, 6, 5)).run([1])


def test_heads_that_fill_their_tiles_equal_the_loop():
    make_rig([33, 16], sizes=(1, 16, 32), cell=16).run([16, 17])


def test_strong_decay_neither_overflows_nor_leaks():
    make_rig([33], sizes=(1, 6, 5), decay=300.0, cell=16).run([1, 3, 17])


def test_rejected_drafts_leave_no_trace():
    rig = make_rig([24, 16], sizes=(1, 6, 5), room=5)
    rig.step([(0, 14), (1, 7)])
    rig.run_with_drafts(6)


def test_half_precision_is_close_to_the_loop():
    rig = make_rig([20], dtype=torch.float16, sizes=(1, 16, 16))
    rig.tolerance = 1e-2
    rig.run([1, 5, 9])


def launch(sizes, dtype, room: int = 0) -> None:
    shape = ChannelDeltaShape(*sizes, 3, 4)
    spec = MemorySpec((GPU_ROWS.channel_delta_memory(shape, str(dtype).removeprefix("torch.")),), draft_room=room)
    view = Store(spec, 2 * max(spec.state_bytes, spec.tail_bytes)).views[0]
    plan = make_plan([Row(70, 71, 0), Row(0, 80)])
    batch = build_batch(plan, spec, torch.zeros(1, dtype=torch.int64), "cpu", GPU_ROWS)
    rates, bias = torch.empty(sizes[0]), torch.empty(sizes[:2])
    inputs = ChannelDeltaInputs(*random_inputs(81, sizes, dtype), rates, bias)
    GPU_ROWS.channel_delta(inputs, batch, view)


def launch_bfloat16() -> None:
    launch((32, 128, 128), torch.bfloat16)


def launch_float32() -> None:
    launch((2, 32, 32), torch.float32, room=5)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_bfloat16, launch_float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("room", [0, 5])
def test_on_a_gpu_rows_of_any_length_equal_the_loop(dtype, tolerance, room):
    rig = make_rig([200, 130, 64, 7, 1], sizes=(4, 128, 128), dtype=dtype, room=room, cell=64, device="cuda")
    rig.tolerance = tolerance
    rig.run([1, 2, 5, 64, 70, 128])
