"""Causal convolution in Triton, against a loop over tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.kernels.causal_conv import naive_conv
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import GPU_ROWS, causal_conv, gated_short_conv
from tests.support.kernels.plans import Capture, Known, Rig, Row, make_plan
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import Store
from weft.kernels.cuda.causal_conv import convolution as cuda_conv
from weft.kernels.cuda.launch import overlap
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

CHANNELS = 6


def make_rig(lengths, width=4, bias=True, activation=True, dtype=torch.float32, channels=CHANNELS, **options) -> Rig:
    """Inputs are a slice of something wider, as a projection's are."""
    torch.manual_seed(0)
    device = options.get("device", "cpu")
    weight = torch.randn(width, channels).t() * width**-0.5
    offset = torch.randn(channels) if bias else None
    sequences = []
    for length in lengths:
        x = torch.randn(length, channels).to(dtype)
        y, windows = naive_conv(x, weight, offset, activation)
        sequences.append(Known((x,), (y,), {"conv": windows}))
    on_device = [None if t is None else t.to(device) for t in (weight, offset)]

    def call(inputs, batch, view):
        wide = torch.full((len(inputs[0]), 3 * channels), torch.nan, dtype=dtype, device=device)
        wide[:, channels : 2 * channels] = inputs[0]
        return (causal_conv(wide[:, channels : 2 * channels], *on_device, activation, batch, view),)

    memory = short_conv_memory(channels, width, str(dtype).removeprefix("torch."))
    return Rig(memory, sequences, call, operations=GPU_ROWS, **options)


def make_gated_rig(lengths, width=3, dtype=torch.float32, channels=CHANNELS, **options) -> Rig:
    torch.manual_seed(0)
    device = options.get("device", "cpu")
    weight = torch.randn(width, channels).t() * width**-0.5
    sequences = []
    for length in lengths:
        projected = torch.randn(length, 3 * channels).to(dtype)
        before, after, value = projected.chunk(3, -1)
        y, windows = naive_conv(before * value, weight, None, False)
        sequences.append(Known((projected,), (after * y,), {"conv": windows}))
    on_device = weight.to(device)

    def call(inputs, batch, view):
        return (gated_short_conv(inputs[0], on_device, None, batch, view),)

    memory = short_conv_memory(channels, width, str(dtype).removeprefix("torch."))
    return Rig(memory, sequences, call, operations=GPU_ROWS, **options)


@pytest.mark.parametrize(
    ("width", "bias", "activation"),
    [(2, True, False), (3, False, False), (4, True, True), (5, False, True), (9, True, True)],
)
def test_packed_rows_of_any_length_equal_the_loop(width, bias, activation):
    rig = make_rig([41, 33, 8, 7, 1], width, bias, activation, room=width - 2)
    rig.run([1, 1, 2, 3, 5, 8, 9, 16, 27])


def test_gates_before_and_after_equal_the_loop():
    rig = make_gated_rig([33, 24, 7, 1])
    rig.run([1, 1, 2, 3, 9, 27])


def test_windows_may_reach_behind_the_cell():
    rig = make_rig([13, 9], cell=3)
    rig.run([1, 2, 3])


@pytest.mark.kernels
@pytest.mark.parametrize(("width", "cell"), [(4, 64), (6, 32)])
def test_long_cells_and_more_channels_than_a_program_takes_equal_the_loop(width, cell):
    rig = make_rig([2 * cell + 2, cell], width, cell=cell, channels=300)
    rig.step([(0, cell + 6), (1, cell - 1)])
    rig.step([(1, 1), (0, cell - 4)])


def test_first_row_of_a_sequence_sees_no_earlier_tenant():
    rig = make_rig([9, 9], width=4)
    rig.step([(0, 9)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 8)])


def test_rejected_drafts_leave_no_trace():
    rig = make_rig([40, 35], room=5)
    rig.step([(0, 14), (1, 7)])
    rig.run_with_drafts(6)


def recorded(rig: Rig, longest: int) -> Rig:
    """Let steps whose rows are short be those recorded for drafts."""
    call = rig.call

    def call_recorded(inputs, batch, view):
        short = batch.longest <= longest
        return call(inputs, replace(batch, longest=longest, host=None, derived={}) if short else batch, view)

    rig.call = call_recorded
    return rig


@pytest.mark.parametrize(("make", "width"), [(make_rig, 2), (make_rig, 3), (make_rig, 4), (make_gated_rig, 3)])
def test_rows_of_a_few_tokens_equal_the_loop_wherever_they_end(make, width, monkeypatch):
    launched = []
    short = cuda_conv.short_kernel
    monkeypatch.setattr(cuda_conv, "short_kernel", Counted(short, launched))
    rig = recorded(make([60, 41, 33, 20, 9], width, cell=16, room=7), 8)
    rig.step([(0, 13), (1, 9), (2, 16), (3, 1)])
    assert not launched, "rows are longer"
    # To the end of a cell, beyond it, inside it, and from the start of a sequence or of a cell.
    rig.step([(0, 3), (1, 8), (2, 5), (3, 8), (4, 2)])
    rig.step([(0, 8), (1, 1), (2, 4), (3, 7), (4, 1)])
    rig.run([5, 8, 1, 4])
    assert len(launched) > 4
    rig = recorded(make([40, 35], width, cell=16, room=7), 8)
    rig.step([(0, 14), (1, 7)])
    rig.run_with_drafts(8)


def test_padding_beside_rows_of_a_few_tokens_has_outputs_of_zero():
    recorded(make_rig([4, 3, 2, 20], cell=16, room=7), 4).step_with_padding(longest=4)


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(grid)
        return self.kernel[grid]


def test_windows_are_the_inputs_to_the_bit():
    rig = make_rig([40, 21], dtype=torch.float16)
    rig.tolerance = 2e-3
    compare = rig.compare

    def exactly(found, answer, what):
        if what.startswith("output"):
            compare(found, answer, what)
        else:
            assert torch.equal(found, answer), what

    rig.compare = exactly
    rig.run([1, 3, 8, 20])


def launch(dtype: torch.dtype, gated: bool, width: int = 4, drafts: bool = False) -> None:
    channels = 128
    spec = MemorySpec((short_conv_memory(channels, width, str(dtype).removeprefix("torch.")),), draft_room=7 * drafts)
    store = Store(spec, 1 << 20)
    rows = [Row(70, 71, 1, 0), Row(64, 200, 2, 1)]
    batch = build_batch(make_plan(rows, [Capture(1, 128, 3)]), spec, torch.zeros(9, dtype=torch.int64), "cpu", GPU_ROWS)
    batch = replace(batch, longest=4, host=None) if drafts else batch
    weight = torch.empty(width, channels).t()
    x = torch.empty(137, 3 * channels, dtype=dtype)
    if gated:
        gated_short_conv(x, weight, None, batch, store.views[0])
    else:
        causal_conv(x[:, channels : 2 * channels], weight, torch.empty(channels), True, batch, store.views[0])


def launch_plain() -> None:
    launch(torch.bfloat16, gated=False)
    launch(torch.float32, gated=False)
    launch(torch.bfloat16, gated=False, width=5)
    launch(torch.bfloat16, gated=False, drafts=True)


def launch_gated() -> None:
    # As on a Hopper GPU, where kernels start before the ones before them end.
    overlap.is_able = lambda device: True
    launch(torch.bfloat16, gated=True, width=3)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_plain, launch_gated)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_rig, make_gated_rig])
def test_on_a_gpu_rows_of_any_length_equal_the_loop(make, dtype):
    rig = make([700, 260, 65, 64, 1], dtype=dtype, channels=2048, device="cuda", cell=64)
    rig.tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    rig.run([1, 1, 2, 63, 64, 300])


@pytest.mark.gpu
@pytest.mark.parametrize("make", [make_rig, make_gated_rig])
def test_on_a_gpu_rows_of_a_few_tokens_equal_the_loop(make):
    rig = recorded(make([100, 90, 65, 20], dtype=torch.bfloat16, channels=3000, device="cuda", cell=64, room=7), 8)
    rig.tolerance = 2e-2
    rig.step([(0, 60), (1, 57), (2, 64), (3, 1)])
    rig.run([8, 4, 1])
