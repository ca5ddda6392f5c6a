"""Kernels whose outcome has a place in wider rows write the same numbers there, and nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels import cuda_attention, cuda_ssd
from tests.support.kernels import native_attention as native_attention_checks
from tests.support.kernels.native_rows import needs_compiler
from tests.support.kernels.operations import CPU, GPU_ROWS, attention
from weft.kernels.cpu import norm
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.norm import gated_rms_norm
from weft.kernels.cpu.together import side_by_side
from weft.kernels.cuda import attention as on_gpu
from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.attention import flashinfer
from weft.kernels.cuda.norm.norms import gated_rms_norm as gated_rms_norm_on_gpu
from weft.kernels.interface import Operations
from weft.kernels.native import attention as native_attention
from weft.kernels.native.calls import RecordedMemory, record

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A number that nobody computes, and the columns before and behind the place.
NOBODYS, BEFORE, BEHIND = 77.0, 8, 16
EPS = 1e-5


class Place:
    """Some columns of some rows; around them lie others."""

    def __init__(self, like: Tensor) -> None:
        rows, *shape = like.shape
        self.size = math.prod(shape)
        whole = (rows + 2, BEFORE + self.size + BEHIND)
        self.whole = torch.full(whole, NOBODYS, dtype=like.dtype, device=like.device)
        self.out = self.whole[1:-1, BEFORE:-BEHIND].unflatten(1, shape)

    def check(self, found: Tensor, wanted: Tensor) -> None:
        """That `found` is the place, that it holds what is wanted, and that all around it is as it was."""
        assert found.data_ptr() == self.out.data_ptr()
        assert torch.equal(self.out, wanted)
        assert torch.equal(found, wanted)
        self.whole[1:-1, BEFORE:-BEHIND] = NOBODYS
        assert (self.whole == NOBODYS).all(), "something was written beside the place"


def compare(compute: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Compute with a place and without; return the outcome."""
    wanted = compute(None)
    place = Place(wanted)
    place.check(compute(place.out), wanted)
    return wanted


@pytest.mark.parametrize("shift", [(0, -1), (0, 1), (-1, 0), (1, 0)])
def test_whoever_writes_beside_its_place_is_noticed(shift):
    wanted = torch.randn(3, 2, 5)
    place = Place(wanted)
    place.out.copy_(wanted)
    row, column = shift
    place.whole[1 + row : 4 + row, BEFORE + column : BEFORE + column + 10] = wanted.flatten(1)
    place.whole[1:-1, BEFORE:-BEHIND] = wanted.flatten(1)
    with pytest.raises(AssertionError, match="beside"):
        place.check(place.out, wanted)


def test_what_lies_side_by_side_lives_as_long_as_a_recording_and_is_one_matrix():
    with record(RecordedMemory(1 << 20)) as recording:
        whole, (first, second) = side_by_side(torch.empty(3, 2, dtype=torch.bfloat16), [4, 6])
    assert recording.pure
    assert recording.memory.taken_bytes == 64
    assert (whole.shape, whole.dtype) == ((3, 10), torch.bfloat16)
    first.fill_(1)
    second.fill_(2)
    assert whole.sum(0).tolist() == [3.0] * 4 + [6.0] * 6


# state space ----------------------------------------------------------------------------------------------------------


def compare_scans(rig) -> None:
    """Make every step run as ever and with a place, without and with a gate; what is left is the same."""
    plain, buffers = rig.call, (rig.states.buffer, rig.tails.buffer)

    def repeated(inputs, batch, view):
        before = [buffer.clone() for buffer in buffers]
        answers = []
        gate = torch.randn(len(inputs[0]), rig.sequences[0].outputs[0][0].numel(), dtype=inputs[0].dtype)
        for gates in (None, gate.to(inputs[0].device)):

            def compute(out, gates=gates):
                for buffer, kept in zip(buffers, before):
                    buffer.copy_(kept)
                return plain(inputs, batch, view, gates, out)[0]

            answers.append(compare(compute))
        return (answers[0],)

    rig.call = repeated


@pytest.mark.parametrize(
    ("operations", "head_dim", "groups"),
    [(GPU_ROWS, 5, 1), pytest.param(GPU_ROWS, 24, 2, marks=pytest.mark.kernels), (CPU, 5, 1), (CPU, 24, 2)],
)
def test_a_scan_writes_into_its_place(operations, head_dim, groups):
    lengths = cuda_ssd.SHORT_LENGTHS
    rig = cuda_ssd.make_rig(lengths, 2, head_dim, groups=groups, cell=16, operations=operations)
    compare_scans(rig)
    for rows in cuda_ssd.SHORT_STEPS:
        rig.step(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(16, 80, 128, 2), (4, 128, 256, 1)])
def test_a_scan_writes_into_its_place_on_the_device(sizes):
    rig = cuda_ssd.make_rig([200, 150, 64, 33, 1], *sizes, dtype=torch.bfloat16, device="cuda", cell=64, raw=True)
    rig.tolerance = 5e-2
    compare_scans(rig)
    rig.run([1, 1, 2, 7, 64, 65, 128])


# attention ------------------------------------------------------------------------------------------------------------


def compare_attention(scene, operations: Operations, sinks: bool) -> None:
    sink = scene.sinks if sinks else None

    def compute(out):
        return attention(scene.q, scene.k, scene.v, scene.batch(operations), scene.view(), scene.scale, None, sink, out)

    compare(compute)


@pytest.mark.parametrize(
    ("operations", "mix"),
    [
        pytest.param(operations, mix, marks=[pytest.mark.kernels] if operations is GPU_ROWS and place else [])
        for operations in (GPU_ROWS, CPU)
        for place, mix in enumerate(cuda_attention.MIXES)
    ],
)
def test_attention_writes_into_its_place(mix, operations):
    rows = cuda_attention.MIXES[mix]
    # Long enough that several programs share a row and their parts are merged.
    compare_attention(cuda_attention.Scene(rows, heads=3, kv_heads=1), operations, sinks=True)
    compare_attention(cuda_attention.Scene(rows, 20, heads=3, kv_heads=1), operations, sinks=False)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_attention_writes_into_its_place_on_the_device(head_dim, monkeypatch):
    rows = cuda_attention.REAL
    scene = cuda_attention.Scene(rows, None, 12, 2, head_dim, cell=64, dtype=torch.bfloat16)
    compare_attention(scene, GPU_ROWS, sinks=True)
    pytest.importorskip("flashinfer")
    on_gpu.warm([scene.shape()])
    flashinfer.finish_compiling()
    monkeypatch.setattr(on_gpu, "FLASHINFER_WORK", 0)
    monkeypatch.delattr(on_gpu, "attend_pieces")
    compare_attention(scene, GPU_ROWS, sinks=True)
    compare_attention(scene, GPU_ROWS, sinks=False)


class Library:
    """As FlashInfer's wrapper: it writes tokens side by side, wherever they are to be."""

    def run(self, q: Tensor, pages: object, out: Tensor) -> Tensor:
        assert out.is_contiguous()
        return out.copy_(q * 2)


def test_what_a_library_cannot_write_into_its_place_is_copied_there():
    scene = cuda_attention.Scene([(30, 31), (0, 9), (3, 20)])
    batch, shape = scene.batch(), scene.shape()
    derived = {("flashinfer", shape): SimpleNamespace(wrapper=Library())}

    def compute(out):
        out = torch.full(scene.q.shape, NOBODYS, device=scene.device) if out is None else out
        flashinfer.attend_prefill(scene.q, out, batch, batch.full, scene.view(), shape, None, derived)
        assert (out[: batch.decodes] == NOBODYS).all()
        return out

    compare(compute)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_attention_in_cpp_writes_into_its_place(dtype, gated):
    scene = native_attention_checks.Scene([40, 7, 100], dtype)
    projected = scene.random(3, 2 * scene.heads + 2 * scene.kv_heads, scene.head_dim)

    def compute(out):
        reading = (scene.batch(True), scene.view(scene.store.clone()), 0.3)
        return native_attention.mix(projected, scene.heads, None, EPS, None, *reading, gated=gated, out=out)

    compare(compute)


# gates ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_an_activation_writes_into_its_place(device):
    gate, x = torch.randn(2, 3, 1100, device=device)
    compare(lambda out: activate("silu", gate, x, out))
    compare(lambda out: activate("relu2", gate, None, out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "groups"), [((24,), 1), ((24,), 3), ((5, 7), 1)])
def test_a_gated_norm_writes_into_its_place(device, shape, groups):
    x, gate = torch.randn(2, 4, *shape, device=device)
    weight = torch.randn(shape[-1], device=device)
    for first in (False, True):
        compare(lambda out, first=first: gated_rms_norm_on_gpu(x, gate, weight, EPS, groups, first, out))


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_norms_of_a_cpu_write_into_their_place(native, dtype, monkeypatch):
    if not native:
        monkeypatch.setattr(norm.native, "available", lambda: False)
    x, gate = torch.randn(2, 5, 60).to(dtype)
    weight = torch.randn(60).to(dtype)
    compare(lambda out: gated_product(gate, x, F.silu, out))
    for groups, first in ((1, True), (3, False)):
        compare(lambda out, groups=groups, first=first: gated_rms_norm(x, gate, weight, EPS, groups, first, out))
    heads = (x.view(5, 3, 20), gate.view(5, 3, 20), weight[:20])
    compare(lambda out: gated_rms_norm(*heads, EPS, 1, True, out))


@needs_compiler
def test_a_place_does_not_keep_kernels_of_a_cpu_from_being_recorded():
    scene = native_attention_checks.Scene([40, 7])
    projected = scene.random(2, scene.heads + 2 * scene.kv_heads, scene.head_dim)
    x, gate = torch.randn(2, 2, 12)
    batch = scene.batch(True)
    with record(RecordedMemory(1 << 20)) as recording:
        _, (one, other, third) = side_by_side(x, [12, 12, scene.heads * scene.head_dim])
        gated_product(gate, x, F.silu, one)
        gated_rms_norm(x, gate, x[0], EPS, out=other)
        out = third.unflatten(-1, (-1, scene.head_dim))
        native_attention.mix(projected, scene.heads, None, EPS, None, batch, scene.view(scene.store), 0.3, out=out)
    assert recording.pure
    assert len(recording.calls) == 3
