"""Matmuls in blocks are matmuls of any size, rounded once, and never those of exact mode."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines import TINY, Ask, dummy_model, greedy, serve, tokens
from tests.exact_traffic import alone, exact_model
from tests.operations import CPU
from tests.test_native_linear import DTYPES, assert_close, exact, in_panels, random
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.activations import NAMES
from weft.kernels.cpu import blocks
from weft.kernels.cpu import exact as exact_layouts
from weft.kernels.cpu import linear as products
from weft.kernels.cpu.blocks import block_columns, product_in_blocks, scratch
from weft.kernels.cpu.linear import activated_linear, linear, prepare
from weft.kernels.native import library, widening
from weft.kernels.native.linear import PANEL, pack, product
from weft.kernels.weight import Weight
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, several chunks of rows."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "MOST_ROWS", 50)


@pytest.fixture
def few_are_many(monkeypatch):
    """Any number of rows may use blocks, on any machine."""
    monkeypatch.setattr(products, "HAS_BFLOAT16", False)
    monkeypatch.setattr(products, "MANY_ROWS", 1)


class UsedBlocks(Exception):
    pass


@pytest.fixture
def refused(monkeypatch, few_are_many):
    def refuse(*ignored, **more):
        raise UsedBlocks

    monkeypatch.setattr(products, "product_in_blocks", refuse)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 130),
    inputs=st.integers(1, 70) | st.integers(500, 530),
    outputs=st.integers(1, 300),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    block_bytes=st.sampled_from([1, 1 << 17, 1 << 20]),
)
def test_any_sizes_give_the_product(dtype, rows, inputs, outputs, biased, threads, block_bytes):
    x = random(rows, inputs, dtype=dtype)
    weight = (random(outputs, inputs, seed=1) / inputs**0.5).bfloat16()
    bias, before = random(outputs, dtype=dtype, seed=2) if biased else None, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.object(blocks, "BLOCK_BYTES", block_bytes), patch.object(blocks, "MOST_ROWS", 50):
            # What an earlier call left there is never read.
            scratch(1 << 16).fill_(torch.nan)
            found = product_in_blocks(x, pack(weight), outputs, bias)
    finally:
        torch.set_num_threads(before)
    assert_close(found, exact(x, weight, bias), dtype)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_activations_are_torchs_own(activation, dtype, parts, small_blocks, few_are_many):
    outputs = 10 * PANEL
    weight, bias = random(outputs, 40, dtype=torch.bfloat16, seed=1) / 6, random(outputs, dtype=dtype, seed=2)
    x = random(120, 40, dtype=dtype)
    prepared = prepare(Weight(weight.to(dtype), bias), twice=False)
    sums = exact(x, weight, bias)
    gate, gated = sums.chunk(2, -1)
    expected = activation(sums) if parts == 1 else activation(gate) * gated
    assert_close(activated_linear(x, prepared, activation, parts), expected, dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_sums_are_rounded_once_after_bias_and_activation(parts, small_blocks):
    weight, bias = random(256, 90, dtype=torch.bfloat16, seed=1) / 6, random(256, dtype=torch.bfloat16, seed=2)
    x = random(70, 90, dtype=torch.bfloat16)
    short = product_in_blocks(x, pack(weight), 256, bias, F.silu, parts)
    assert torch.equal(short, product_in_blocks(x.float(), pack(weight), 256, bias.float(), F.silu, parts).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_openmp_the_pool_does_the_same(dtype, monkeypatch, small_blocks):
    x, weight = random(70, 90, dtype=dtype), random(300, 90, dtype=torch.bfloat16, seed=1)
    bias = random(300, dtype=dtype, seed=2)
    found = product_in_blocks(x, pack(weight), 300, bias)
    monkeypatch.setattr(widening, "team", lambda: 0)
    assert torch.equal(product_in_blocks(x, pack(weight), 300, bias), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_many_rows_on_weights_of_16_bits_are_multiplied_in_blocks(dtype, monkeypatch, refused):
    monkeypatch.setattr(products, "MANY_ROWS", 20)
    short = random(64, 16, dtype=torch.bfloat16)
    weight = prepare(Weight(short.to(dtype)), twice=True)
    x = random(20, 16, dtype=dtype)
    assert_close(linear(x[:19], weight), exact(x[:19], short), dtype)
    for many in (x, x.view(4, 5, 16).transpose(0, 1)):
        with pytest.raises(UsedBlocks):
            linear(many, weight)
    with pytest.raises(UsedBlocks):
        activated_linear(x, weight, F.silu, 2)
    # Weights of 32 bits need no widening, and experts choose by themselves.
    linear(random(20, 16), prepare(Weight(random(64, 16)), twice=False))
    linear(x, in_panels(short.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_mode_never_uses_blocks(dtype, refused):
    weight = exact_layouts.prepare(Weight(random(160, 90, dtype=torch.bfloat16).to(dtype)), twice=True)
    x = random(250, 90, dtype=dtype)
    together = linear(x, weight)
    assert torch.equal(linear(x[7:8], weight)[0], together[7])
    activated_linear(x, weight, F.silu)


def test_engines_use_blocks_and_exact_engines_do_not(refused):
    ask = Ask(tokens(70, seed=1), greedy(2))
    alone(exact_model("lfm2", torch.bfloat16), ask)
    model, room = dummy_model(TINY["lfm2"], torch.bfloat16, CPU), 16 << 20
    spec, config = MemorySpec(model.memories(CPU)), EngineConfig(memory_bytes=room, max_sequences=2, max_length=128)
    runner = Runner(model, spec, room, config.max_sequences, threads=1, operations=CPU)
    with pytest.raises(UsedBlocks):
        serve(Engine(spec, runner, config), [ask])


def test_a_step_of_cpp_kernels_has_too_few_rows_for_blocks():
    """Recorded steps and drafts in them give a row the same bits in every batch, as passes of exact mode do."""
    assert min(products.MANY_ROWS, *products.MANY_ROWS_OF.values()) > library.FEW_ROWS


def test_no_row_sees_another(small_blocks):
    x, panels = random(100, 90), pack(random(200, 90, dtype=torch.bfloat16, seed=1))
    before = product_in_blocks(x, panels, 200)
    x[3] = torch.nan
    after = product_in_blocks(x, panels, 200)
    assert after[3].isnan().all()
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[4:], before[4:])


def test_scratch_is_bounded_and_kept_by_its_thread():
    threads = torch.get_num_threads()
    for inputs in (1, 256, 768, 8192, 100_000):
        for width in (1, 32, 768, 4096, 250_000):
            for parts in (1, 2):
                columns = block_columns(inputs, width, parts)
                assert columns % PANEL == 0
                assert columns <= max(blocks.LEAST_COLUMNS, width + PANEL - 1)
                fits = parts * columns * inputs * 4 <= blocks.BLOCK_BYTES * threads
                assert fits or columns <= blocks.LEAST_COLUMNS
    with torch.inference_mode():
        first = scratch(1 << 16)
    assert scratch(1 << 15).data_ptr() == first.data_ptr()
    # Also outside of inference mode.
    first.fill_(0)
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch(1 << 15)))
    thread.start()
    thread.join()
    assert others[0].data_ptr() != first.data_ptr()


def test_a_panel_keeps_its_place_and_its_neighbours_are_not_written():
    weight, to = random(96, 11, dtype=torch.bfloat16), torch.full((11, 200), -1.0)
    widening.widen(pack(weight)[1:], to[:, 20:84])
    assert torch.equal(to[:, 20:84], weight[32:].float().t())
    assert (to[:, :20] == -1).all()
    assert (to[:, 84:] == -1).all()


def test_blocks_agree_with_panels(small_blocks):
    x, weight = random(230, 300, dtype=torch.bfloat16), random(450, 300, dtype=torch.bfloat16, seed=1) / 17
    found, expected = (multiply(x, pack(weight), 450) for multiply in (product_in_blocks, product))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
