"""The short convolution of decodes in one kernel with its product, against both by themselves and against a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.causal_conv import naive_conv
from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.cuda_short_conv import CELL, STARTS, Case, assert_close, decodes
from tests.support.kernels.operations import CPU, GPU_ROWS, projected_short_conv
from tests.support.kernels.plans import Known, Rig
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.kernels.cuda import causal_conv as short_conv
from weft.kernels.recurrent import short_conv_memory
from weft.models.layers.short_conv import ShortConv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(case: Case, tolerance: float = 0.0) -> None:
    """Outputs, and all memory: what is to be written and what is not."""
    mine, theirs = case.view(), case.view()
    assert short_conv.suits(case.x, case.projection, case.batch)
    found, wanted = case.together(mine), case.one_by_one(theirs)
    assert_close(found, wanted, mine, theirs, tolerance)
    assert not torch.equal(mine.tail["conv"], case.tail)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 5, 17, 32])
def test_outputs_tails_and_windows_are_those_of_product_and_convolution_to_the_bit(device, rows, width):
    check(Case(rows, 144, 20, width, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "channels"), [(12, 256, 16), (12, 80, 7), (24, 384, 33)])
def test_so_they_are_with_biases_and_room_for_drafts(device, rows, inputs, channels):
    check(Case(rows, inputs, channels, 3, device=device, bias=True, room=2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(len(STARTS)))
@pytest.mark.parametrize(("inputs", "channels"), [(80, 7), (1040, 7), (3088, 3)])
def test_so_they_are_of_one_row_wherever_it_stands(device, first, inputs, channels):
    """With several pieces of weights, and with so many that a program takes one channel."""
    check(Case(1, inputs, channels, 3, device=device, bias=True, room=2, first=first), tolerance=5e-3)


def test_of_zeros_before_a_sequence_nothing_is_read():
    case = Case(12, 144, 20, 4)
    starts = case.batch.start.tolist()
    for row, start in enumerate(starts):
        ring = case.tail[case.batch.tail[row]]
        seen = {position % len(ring) for position in range(max(start - start % CELL, start - 3), start)}
        ring[[place for place in range(len(ring)) if place not in seen]] = torch.nan
        if start % CELL >= 3 or start < CELL:
            case.state[row] = torch.nan
    view = case.view()
    assert case.together(view).isfinite().all()
    assert view.state["conv"][case.batch.closing[case.batch.closing >= 0]].isfinite().all()


def test_padding_changes_nothing_for_other_rows():
    """Rows at position 0 that share a tail, as a recorded step has them behind its real ones."""
    case = Case(12, 144, 20, 3)
    batch = case.batch
    start, closing, tail = batch.start.clone(), batch.closing.clone(), batch.tail.clone()
    start[9:], closing[9:], tail[9:] = 0, -1, 0
    case.batch = replace(batch, start=start, closing=closing, tail=tail)
    padded, alone = case.view(), case.view()
    found = case.together(padded)
    first = {name: getattr(case.batch, name)[:9] for name in ("start", "slot", "tail", "closing")}
    case.batch = replace(case.batch, rows=9, decodes=9, **first)
    case.x = case.x[:9]
    assert torch.equal(found[:9], case.together(alone))
    assert torch.equal(padded.state["conv"], alone.state["conv"])
    assert torch.equal(padded.tail["conv"][tail[:9]], alone.tail["conv"][tail[:9]])


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_equals_the_reference(bias, monkeypatch):
    layer = ShortConv(32, 3, bias, torch.float16)
    layer.index = 0
    layer.in_proj.half()
    layer.out_proj.half()
    for weight in layer.parameters():
        weight.normal_(0.0, 0.3)
    case = Case(12, 32, 32, 3)
    calls = []
    original = short_conv.projected_short_conv
    monkeypatch.setattr(short_conv, "projected_short_conv", lambda *args: calls.append(args) or original(*args))
    mine, theirs = case.view(), case.view()
    found = layer(case.x, None, case.batch, (mine,))
    assert len(calls) == 1
    wanted = layer(case.x, None, decodes(12, case.spec, "cpu", CPU), (theirs,))
    assert len(calls) == 1
    assert_close(found, wanted, mine, theirs, 2e-2)


def make_rig(lengths, inputs=48, width=3, dtype=torch.float16, channels=20, **options) -> Rig:
    device = options.get("device", "cpu")
    weight = torch.randn(width, channels).t() * width**-0.5
    projection = (torch.randn(3 * channels, inputs) * inputs**-0.5).to(dtype)
    sequences = []
    for length in lengths:
        x = torch.randn(length, inputs).to(dtype)
        before, after, value = F.linear(x.float(), projection.float()).to(dtype).chunk(3, -1)
        y, windows = naive_conv(before * value, weight, None, False)
        sequences.append(Known((x,), (after * y,), {"conv": windows}))
    projection, weight = projection.to(device), weight.to(device)

    def call(inputs, batch, view):
        return (projected_short_conv(inputs[0], projection, None, None, weight, None, batch, view),)

    memory = short_conv_memory(channels, width, str(dtype).removeprefix("torch."))
    rig = Rig(memory, sequences, call, operations=GPU_ROWS, **options)
    # Where a product is rounded the other way, its whole term is.
    rig.tolerance = 1e-1 if dtype == torch.bfloat16 else 5e-3
    return rig


@pytest.mark.kernels
def test_decodes_between_longer_rows_equal_the_loop():
    rig = make_rig([33, 24, 17, 7, 1])
    rig.step([(0, 5), (1, 9)])
    rig.run([1])


def test_rejected_drafts_leave_no_trace():
    rig = make_rig([40, 35], room=5)
    rig.step([(0, 14), (1, 7)])
    rig.run_with_drafts(6)


def test_it_suits_few_decodes_in_half_precision():
    case = Case(4, 48, 20, 3)
    x, projection, batch = case.x, case.projection, case.batch
    assert short_conv.suits(x, projection, batch)
    assert not short_conv.suits(x, projection, replace(batch, pieces=1))
    assert not short_conv.suits(x.float(), projection.float(), batch)
    assert not short_conv.suits(x.repeat(9, 1), projection, batch)
    assert not short_conv.suits(x[:, :40], projection[:, :40].contiguous(), batch)


def launch() -> None:
    for rows in (1, 7, 32):
        for bias in (False, True):
            case = Case(rows, 2048, 2048, 3, torch.bfloat16, bias=bias)
            case.together(case.view())
    case = Case(5, 144, 20, 4)
    case.together(case.view())


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 1536, 2048])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 24, 32])
def test_layers_of_real_models_are_product_and_convolution(rows, hidden):
    # Products alone are split among programs there, and so are added up in another order.
    check(Case(rows, hidden, hidden, 3, torch.bfloat16, "cuda"), tolerance=4e-2)


@pytest.mark.gpu
def test_on_a_gpu_decodes_between_longer_rows_equal_the_loop():
    rig = make_rig([140, 130, 70, 64, 1], 2048, dtype=torch.bfloat16, channels=2048, device="cuda", cell=64)
    rig.step([(0, 60), (1, 65)])
    rig.run([1])
