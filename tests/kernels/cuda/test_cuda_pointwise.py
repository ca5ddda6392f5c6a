"""Norms, activations and rotations in Triton, against the reference's operations."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import GPU_ROWS
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import Store
from weft.kernels.activations import NAMES
from weft.kernels.cuda.launch import overlap
from weft.kernels.plain.norm import gated_rms_norm, rms_norm
from weft.kernels.plain.norm import join as add_and_norm
from weft.kernels.plain.norm import rms_norm as rms_norm_heads
from weft.kernels.plain.rotary import make_rotation, rotate
from weft.kernels.rotary import RotaryKind, frequencies
from weft.kernels.stream import Change
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

EPS = 1e-5


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def strided(x):
    """The same as a slice of something wider, in which all else is NaN."""
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    inside = wide[..., x.shape[-1] : 2 * x.shape[-1]]
    inside.copy_(x)
    return inside


def check_join(rows, size, dtype, device, tolerance):
    from weft.kernels.cuda.norm.norms import join

    x, one, other, third = (random(rows, size, seed=seed, dtype=dtype, device=device) for seed in range(4))
    weight, inner = (random(size, seed=seed, device=device) for seed in (4, 5))
    for changes in (
        [Change(strided(one))],
        [Change(one, 0.22)],
        [Change(one, 1.0, inner, EPS)],
        [Change(one, 0.5), Change(strided(other), 2.0)],
        [Change(one), Change(other, 1.0, inner, EPS)],
        [Change(one), Change(other), Change(third)],
        [Change(torch.stack([one.float(), other.float(), third.float()]), 0.5)],
        [Change(one), Change(torch.stack([third.float(), other.float()]), 1.0, inner, EPS)],
    ):
        total, normed = join(strided(x), changes, weight, EPS)
        same = [Change(c.value.cpu(), c.factor, None if c.weight is None else c.weight.cpu(), c.eps) for c in changes]
        for found, answer in zip((total, normed), add_and_norm(x.cpu(), same, weight.cpu(), EPS)):
            assert found.dtype == dtype
            torch.testing.assert_close(found.cpu(), answer, rtol=tolerance, atol=tolerance)
    same, normed = join(x, [], weight, EPS)
    assert same is x
    torch.testing.assert_close(normed.cpu(), rms_norm(x.cpu(), weight.cpu(), EPS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 33)])
def test_an_addition_and_its_norm_equal_the_reference(rows, size):
    check_join(rows, size, torch.float32, "cpu", 1e-5)


def check_gated_norm(tokens, shape, groups, dtype, device, tolerance):
    from weft.kernels.cuda.norm.norms import gated_rms_norm as kernel

    x, gate = random(tokens, *shape, device=device), random(tokens, *shape, seed=1, dtype=dtype, device=device)
    weight = random(shape[-1], seed=2, device=device)
    for gate_first in (False, True):
        found = kernel(strided(x), strided(gate), weight, EPS, groups, gate_first)
        expected = gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), EPS, groups, gate_first)
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "groups"), [((24,), 1), ((24,), 3), ((5, 7), 1)])
def test_the_gated_norm_equals_the_reference(shape, groups):
    check_gated_norm(4, shape, groups, torch.float32, "cpu", 1e-5)


def check_activations(rows, size, dtype, device, tolerance):
    from weft.kernels.cuda.activation import activate

    gate, up = (random(rows, size, seed=seed, dtype=dtype, device=device) * 3 for seed in (0, 1))
    for function, name in NAMES.items():
        alone, product = activate(name, strided(gate)), activate(name, strided(gate), strided(up))
        expected = function(gate.float())
        torch.testing.assert_close(alone.float(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(product.float(), expected * up.float(), rtol=tolerance, atol=tolerance)
        assert alone.dtype == product.dtype == dtype


def test_activations_equal_the_reference():
    check_activations(3, 1100, torch.float32, "cpu", 1e-5)


def test_an_activation_of_nan_is_nan():
    from weft.kernels.cuda.activation import activate

    for name in NAMES.values():
        assert activate(name, torch.full((1, 2), torch.nan)).isnan().all(), name


def test_cosines_and_sines_equal_the_reference():
    from weft.kernels.cuda.rotary import make_rotation as kernel

    positions, frequency = torch.tensor([0, 1, 77, 5000], dtype=torch.int32), frequencies(RotaryKind(12))
    found, expected = (make(positions, frequency, 1.5, torch.float32) for make in (kernel, make_rotation))
    torch.testing.assert_close(found.cosine, expected.cosine)
    torch.testing.assert_close(found.sine, expected.sine)


def rotating_rows(window, heads, kv_heads, head_dim, dtype, device, cell=8):
    """A decode and two longer rows, their batch and their pages, which are NaN."""
    memory = AttentionMemory(kv_heads, head_dim, str(dtype).removeprefix("torch."), window)
    spec = MemorySpec((memory,), cell=cell)
    store = Store(spec, 12 * (spec.page_bytes + spec.window_page_bytes), device)
    store.buffer.fill_(0xFF)
    spans = [(2 * cell + 3, 2 * cell + 4), (0, cell + 5), (cell - 1, cell + 2)]
    pages = [(7, 2, 9), (4, 11), (0, 3)]
    rows = [Row(*span, pages=own, window_pages=own) for span, own in zip(spans, pages)]
    batch = build_batch(make_plan(rows), spec, torch.zeros(9, dtype=torch.int64, device=device), device, GPU_ROWS)
    places = [(own[p // cell], p % cell) for span, own in zip(spans, pages) for p in range(*span)]
    return batch, store, places


def check_rotating(norm, size, heads, kv_heads, head_dim, dtype, device, tolerance, window=None):
    from weft.kernels.cuda.rotary import rotate_and_write

    batch, store, places = rotating_rows(window, heads, kv_heads, head_dim, dtype, device)
    view = store.views[0]
    tokens, turning = len(places), heads + kv_heads
    projected = random(tokens, turning + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    weight = random(turning, head_dim, seed=1, device=device) if norm else None
    rotation = None
    if size:
        frequency = frequencies(RotaryKind(size)).to(device)
        rotation = make_rotation(batch.rotary_positions, frequency, 1.0, dtype)
    queries = rotate_and_write(projected, heads, weight, EPS, rotation, batch, view)
    expected = projected[:, :turning]
    expected = expected if weight is None else rms_norm_heads(expected, weight, EPS)
    expected = expected if rotation is None else rotate(expected, rotation)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(queries, expected[:, :heads], **close)
    page, offset = (torch.tensor(column, device=device) for column in zip(*places))
    torch.testing.assert_close(view.keys[page, offset], expected[:, heads:], **close)
    torch.testing.assert_close(view.values[page, offset], projected[:, turning : turning + kv_heads])
    view.keys[page, offset] = view.values[page, offset] = torch.nan
    for tensor in (view.keys, view.values):
        assert tensor.isnan().all(), "something else was written"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [0, 6, 12])
def test_queries_keys_and_values_are_normed_turned_and_put_where_they_belong(norm, size):
    window = 5 if norm else None
    check_rotating(norm, size, 3, 1, 12, torch.float32, "cpu", 1e-5, window)
    # Programs of two heads: four of queries, one of keys and one of values.
    check_rotating(norm, size, 8, 2, 12, torch.float32, "cpu", 1e-5, window)


def launch_all() -> None:
    from weft.kernels.cuda.activation import activate
    from weft.kernels.cuda.norm.norms import gated_rms_norm, join
    from weft.kernels.cuda.rotary import make_rotation as kernel
    from weft.kernels.cuda.rotary import rotate_and_write

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    # As on a Hopper GPU, where kernels start before the ones before them end.
    overlap.is_able = lambda device: True
    join(empty(4, 2048), [], empty(2048), EPS)
    join(empty(4, 2048), [Change(empty(4, 2048), 0.5, empty(2048), EPS)], torch.empty(2048), EPS)
    join(empty(4, 2048), [Change(empty(4, 2048)), Change(empty(4, 2048), 0.5)], empty(2048), EPS)
    gated_rms_norm(torch.empty(4, 1024), empty(4, 1024), empty(1024), EPS, 8, True)
    gated_rms_norm(empty(4, 32, 128), empty(4, 32, 128), empty(128), EPS, 1, False)
    for name in NAMES.values():
        activate(name, empty(4, 512), empty(4, 512))
    activate("relu2", empty(4, 512))
    for size, norm in ((64, True), (32, True), (0, False)):
        batch, store, places = rotating_rows(None, 8, 2, 64, torch.bfloat16, "cpu")
        rotation = kernel(batch.positions, torch.empty(size // 2), 1.0, torch.bfloat16) if size else None
        weight = empty(10, 64) if norm else None
        rotate_and_write(empty(len(places), 12, 64), 8, weight, EPS, rotation, batch, store.views[0])


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_all)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
class TestOnAGPU:
    @pytest.mark.parametrize("size", [2048, 3840, 4480])
    def test_an_addition_and_its_norm_equal_the_reference(self, size, dtype, tolerance):
        check_join(300, size, dtype, "cuda", tolerance)

    @pytest.mark.parametrize(("shape", "groups"), [((10240,), 8), ((8192,), 1), ((32, 128), 1)])
    def test_the_gated_norm_equals_the_reference(self, shape, groups, dtype, tolerance):
        check_gated_norm(100, shape, groups, dtype, "cuda", tolerance)

    def test_activations_equal_the_reference(self, dtype, tolerance):
        check_activations(200, 8192, dtype, "cuda", tolerance)

    @pytest.mark.parametrize(("norm", "size", "sizes"), [
        (True, 64, (32, 8, 64)), (True, 64, (16, 2, 256)), (False, 0, (40, 8, 128)), (False, 128, (24, 4, 128)),
    ])  # fmt: skip
    def test_queries_keys_and_values_are_put_where_they_belong(self, norm, size, sizes, dtype, tolerance):
        check_rotating(norm, size, *sizes, dtype, "cuda", tolerance)


@pytest.mark.gpu
def test_on_a_gpu_an_early_start_changes_nothing(monkeypatch):
    from weft.kernels.cuda.activation import activate
    from weft.kernels.cuda.norm.norms import join

    first, second = (random(*shape, dtype=torch.bfloat16, device="cuda") / 32 for shape in ((4096, 1024), (1024, 2048)))
    weight = random(1024, device="cuda")
    start = random(32, 1024, seed=1, dtype=torch.bfloat16, device="cuda")

    def run():
        x, change = start, start
        for _ in range(200):
            x, normed = join(x, [Change(change, 0.1)], weight, EPS)
            gate, up = (normed @ first.t()).chunk(2, -1)
            change = activate("silu", gate, up) @ second.t()
        return x

    early = run()
    monkeypatch.setattr(overlap, "is_able", lambda device: False)
    assert torch.equal(early, run())
