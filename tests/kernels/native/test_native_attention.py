"""Attention of rows of one token in C++ equals the references: norm, rotation, writing, reading and gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.native_attention import CELL, EPS, SCALE, Scene, starts
from tests.support.kernels.native_rows import NAMES, dtypes, needs_compiler
from tests.support.kernels.operations import attention
from tests.support.kernels.plans import Row, make_plan
from weft.kernels.cpu.norm import rms_norm_heads
from weft.kernels.cpu.rotary import make_rotation, rotate
from weft.kernels.native import attention as native
from weft.kernels.rotary import RotaryKind, frequencies
from weft.models.layers.attention import Attention, AttentionShape

pytestmark = needs_compiler


shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 13]), st.sampled_from([2, 8, 16, 24, 64, 82])
)
windows = st.sampled_from([None, 1, 7, 16, 17, 40, 100, 1000])


@settings(max_examples=60, deadline=None)
@given(starts, dtypes, shapes, windows, st.integers(0, 4), st.sampled_from([0, 20]), st.data())
def test_rows_and_what_they_leave_equal_the_reference(starts, dtype, shape, window, shared, spare, data):
    kv_heads, group, head_dim = shape
    scene = Scene(starts, dtype, kv_heads, group, head_dim, window, shared * CELL, spare, seed=len(starts))
    scene.compare(
        rotary=data.draw(st.sampled_from([None, head_dim, 2 * (head_dim // 3)]).filter(lambda size: size != 0)),
        norm=data.draw(st.sampled_from([None, torch.float32, dtype])),
        gated=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([None, 2.0, 50.0])),
        sinks=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("stretch", [16, 32, 512])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 100])
def test_how_the_work_is_shared_out_changes_nothing(monkeypatch, stretch, threads, window):
    monkeypatch.setattr(native, "STRETCH", stretch)
    monkeypatch.setattr(native, "LEAST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    Scene([200, 3, 95, 700, 96, 701], window=window, shared=96).compare(sinks=True)


def test_a_row_comes_out_the_same_bit_by_bit_whoever_is_beside_it(monkeypatch):
    monkeypatch.setattr(native, "STRETCH", 64)
    starts = [300, 305, 150, 310, 129]
    scene = Scene(starts, head_dim=40, shared=128)
    q, k, v = (scene.random(len(starts), heads, 40) for heads in (6, 2, 2))
    together = attention(q, k, v, scene.batch(True), scene.view(scene.store), SCALE)
    for row, start in enumerate(starts):
        pages = scene.plan.page_table[row, : start // CELL + 1].tolist()
        alone = replace(scene, starts=[start])
        alone.plan = make_plan([Row(start, start + 1, pages=pages)])
        inputs = (x[row : row + 1] for x in (q, k, v))
        found = attention(*inputs, alone.batch(True), scene.view(scene.store), SCALE)
        assert found.equal(together[row : row + 1])


def test_keys_are_rounded_where_the_reference_rounds():
    """After the norm, after the product with the cosine and at the end: all but a few are the same bit by bit."""
    scene = Scene([40] * 9, torch.bfloat16, head_dim=64)
    projected, weight = scene.random(9, 10, 64), 1 + 0.2 * scene.random(8, 64).float()
    batch = scene.batch(True)
    rotation = make_rotation(batch.positions, frequencies(RotaryKind(48)), 1.0, torch.bfloat16)
    native.mix(projected, 6, weight, EPS, rotation, batch, scene.view(scene.store), SCALE)
    keys = rotate(rms_norm_heads(projected[:, :8], weight, EPS), rotation)[:, 6:]
    written = scene.store[batch.full.write_page, 1, 40 % CELL]
    assert (written == keys).float().mean() > 0.999


@pytest.mark.parametrize("dtype", NAMES)
def test_cells_longer_than_a_chunk_are_read_to_their_end(dtype):
    Scene([250, 99, 63, 64], dtype, cell=100, window=130).compare()


@pytest.mark.parametrize("dtype", NAMES)
def test_heads_and_cells_of_real_models(dtype):
    Scene([1100, 1101, 70, 1150], dtype, kv_heads=2, group=3, head_dim=128, cell=64, shared=1024).compare(
        rotary=32, norm=torch.float32, gated=True
    )


def test_scores_far_apart_neither_overflow_nor_vanish():
    scene = Scene([90, 40], head_dim=16)
    scene.store *= 30
    # Scores of some hundreds are rounded by some 1e-5, each processor in its own way, and weights with them.
    scene.compare(sinks=True, tolerance=1e-3)


def test_a_nan_that_a_row_sees_is_not_hidden():
    scene = Scene([700, 40], shared=0)
    scene.store[scene.plan.page_table[0, 5], 1, 3] = torch.nan
    q, k, v = (scene.random(2, heads, 24) for heads in (6, 2, 2))
    out = attention(q, k, v, scene.batch(True), scene.view(scene.store), SCALE)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
def test_the_layer_gives_the_same_either_way(gated):
    shape = AttentionShape(
        hidden=32,
        heads=6,
        kv_heads=2,
        head_dim=24,
        dtype=torch.float32,
        norm_eps=EPS,
        softcap=5.0,
        sinks=True,
        gated=gated,
    )
    layer, scene = Attention(shape), Scene([40, 7, 100])
    for parameter in layer.parameters():
        parameter.data.copy_(scene.random(*parameter.shape) / 4)
    layer.index = 0
    x, plain = scene.random(3, 32), scene.batch(False)
    rotation = make_rotation(plain.positions, frequencies(RotaryKind(24)), 1.0, torch.float32)
    stores = scene.store.clone(), scene.store.clone()
    answers = [
        layer(x, rotation, batch, (scene.view(store),)) for batch, store in zip((plain, scene.batch(True)), stores)
    ]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*stores, rtol=1e-5, atol=1e-5, equal_nan=True)
