"""Attention of rows of one token in C++ over pages of codes equals that over what the pages hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.coded_pages import KINDS, held, in_codes
from tests.support.kernels.native_attention import CELL, SCALE, Scene, starts
from tests.support.kernels.native_rows import NAMES, dtypes, needs_compiler
from tests.support.kernels.operations import attention
from tests.support.kernels.plans import Row, make_plan
from tests.support.models.engines import TINY, Ask, dummy_model, greedy, serve, tokens
from weft.base.config import EngineConfig
from weft.device.store import AttentionView
from weft.engine.loop import Engine
from weft.kernels.choosing import choose
from weft.kernels.native import attention as native
from weft.kernels.native import replay
from weft.kernels.pages import BROKEN, decoded, encoded
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

pytestmark = needs_compiler

kinds = st.sampled_from(list(KINDS.values()))
shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 13]), st.sampled_from([2, 8, 16, 24, 64, 82])
)
windows = st.sampled_from([None, 1, 7, 16, 17, 40, 100, 1000])
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@settings(max_examples=30, deadline=None)
@given(kinds, starts, dtypes, shapes, windows, st.integers(0, 4), st.sampled_from([0, 20]), st.data())
def test_rows_and_the_codes_they_leave_equal_the_reference(kind, starts, dtype, shape, window, shared, spare, data):
    kv_heads, group, head_dim = shape
    scene = Scene(starts, dtype, kv_heads, group, head_dim, window, shared * CELL, spare, seed=len(starts))
    scene.compare(
        rotary=data.draw(st.sampled_from([None, head_dim, 2 * (head_dim // 3)]).filter(lambda size: size != 0)),
        norm=data.draw(st.sampled_from([None, torch.float32, dtype])),
        gated=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([None, 2.0, 50.0])),
        sinks=data.draw(st.booleans()),
        kind=kind,
    )


@settings(max_examples=30, deadline=None)
@given(kinds, starts, dtypes, shapes, windows)
def test_bits_are_those_of_pages_that_hold_the_same_numbers(kind, starts, dtype, shape, window):
    kv_heads, group, head_dim = shape
    scene = Scene(starts, dtype, kv_heads, group, head_dim, window)
    q, *new = (scene.random(len(starts), heads, head_dim) for heads in (scene.heads, kv_heads, kv_heads))
    coded = in_codes(scene.view(scene.store), kind)
    numbers = held(coded, dtype)
    found = attention(q, *new, scene.batch(True), coded, SCALE)
    same = (decoded(*encoded(part, kind), dtype) for part in new)
    assert torch.equal(found, attention(q, *same, scene.batch(True), numbers, SCALE))


@each_kind
@pytest.mark.parametrize("stretch", [16, 512])
@pytest.mark.parametrize("threads", [1, 3])
def test_how_the_work_is_shared_out_changes_nothing(monkeypatch, kind, stretch, threads):
    monkeypatch.setattr(native, "STRETCH", stretch)
    monkeypatch.setattr(native, "LEAST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    Scene([200, 3, 95, 700, 96, 701], window=100, shared=96).compare(sinks=True, kind=kind)


@each_kind
def test_a_row_has_the_same_bits_whoever_is_beside_it(monkeypatch, kind):
    monkeypatch.setattr(native, "STRETCH", 64)
    starts = [300, 305, 150, 310, 129]
    scene = Scene(starts, head_dim=40, shared=128)
    coded = in_codes(scene.view(scene.store), kind)
    q, k, v = (scene.random(len(starts), heads, 40) for heads in (6, 2, 2))
    together = attention(q, k, v, scene.batch(True), coded, SCALE)
    for row, start in enumerate(starts):
        pages = scene.plan.page_table[row, : start // CELL + 1].tolist()
        lone = replace(scene, starts=[start])
        lone.plan = make_plan([Row(start, start + 1, pages=pages)])
        inputs = (x[row : row + 1] for x in (q, k, v))
        assert attention(*inputs, lone.batch(True), coded, SCALE).equal(together[row : row + 1])


@each_kind
@pytest.mark.parametrize("dtype", NAMES)
def test_heads_and_cells_of_real_models(kind, dtype):
    Scene([1100, 1101, 70, 1150], dtype, kv_heads=2, group=3, head_dim=128, cell=64, shared=1024).compare(
        rotary=32, norm=torch.float32, gated=True, kind=kind
    )
    Scene([250, 99, 63, 64], dtype, cell=100, window=130).compare(kind=kind)


def write(kind: torch.dtype, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Have the kernel write these values, one for each row."""
    rows, _, head_dim = heads.shape
    scene = Scene([0] * rows, heads.dtype, kv_heads=1, group=1, head_dim=head_dim)
    coded = in_codes(scene.view(scene.store), kind)
    assert coded.value_exponents is not None
    attention(heads * 0, heads, heads, scene.batch(True), coded, SCALE)
    assert torch.equal(coded.value_exponents[scene.written], coded.key_exponents[scene.written])
    assert torch.equal(coded.values.view(torch.uint8)[scene.written], coded.keys.view(torch.uint8)[scene.written])
    return coded.values[scene.written], coded.value_exponents[scene.written]


@each_kind
@pytest.mark.parametrize("dtype", NAMES)
def test_numbers_of_every_size_have_the_codes_of_the_definition(kind, dtype):
    torch.manual_seed(1)
    heads = torch.randn(60, 1, 40) * torch.logspace(-44, 38, 60).view(-1, 1, 1)
    # Around every border between two codes, and between two powers of two.
    steps = torch.tensor([1 - 2.0**-23, 1.0, 1 + 2.0**-23])
    borders = (torch.arange(1, 2000).view(-1, 1) * 0.125 * steps).view(-1, 1, 1)
    largest = torch.tensor([127.0, 448.0]).view(-1, 1, 1) * steps.view(1, -1, 1)
    heads = torch.cat([heads, heads.new_zeros(1, 1, 40), (borders[:5960] / 512).view(149, 1, 40)])
    heads = torch.cat([heads, torch.nn.functional.pad(largest.view(-1, 1, 1), (0, 39), value=1.3)]).to(dtype)
    codes, exponents = write(kind, heads)
    expected = encoded(heads, kind)
    assert torch.equal(exponents, expected[1])
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))


@each_kind
def test_what_is_no_number_is_broken_and_seen(kind):
    heads = torch.ones(3, 1, 24)
    heads[:, 0, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert (write(kind, heads)[1] == BROKEN).all()
    for part in ("keys", "values"):
        scene = Scene([700, 40], shared=0)
        getattr(scene.view(scene.store), part)[scene.plan.page_table[0, 5], 3, :, 7] = torch.nan
        coded = in_codes(scene.view(scene.store), kind)
        out = attention(*(scene.random(2, heads, 24) for heads in (6, 2, 2)), scene.batch(True), coded, SCALE)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_replayed(kind, monkeypatch):
    model = dummy_model(TINY["lfm2"])
    model.keep(kind)
    chosen = choose("cpu", torch.float32, model.memories)
    assert all(choice.package == "native" for choice in chosen.choices if choice.group == "attention")

    def answers() -> tuple[list[list[int]], replay.Replays]:
        spec = MemorySpec(model.memories(chosen.operations))
        config = EngineConfig(memory_bytes=16 << 20, max_sequences=4, max_tokens_per_step=96, max_length=256)
        runner = Runner(model, spec, config.memory_bytes, 4, threads=1, operations=chosen.operations)
        asks = [Ask(tokens(40 + 23 * i, i), greedy(26 + 10 * i), step=9 * i) for i in range(3)]
        return [each.tokens for each in serve(Engine(spec, runner, config), asks)], runner.eager.compute

    found, replays = answers()
    assert replays.steps
    assert None not in replays.steps.values()
    monkeypatch.setattr(replay.Replays, "run", lambda self, batch: self.compute(batch))
    assert answers()[0] == found


# Planted bugs --------------------------------------------------------------------------------------------------------


def give(patch: pytest.MonkeyPatch, other: Callable[[AttentionView], AttentionView]) -> None:
    """Give the kernel other pages of codes than those that it is called with."""
    mix = native.mix

    def planted(*inputs: Any, **more: Any) -> torch.Tensor:
        views = (isinstance(each, AttentionView) and each.key_exponents is not None for each in inputs)
        return mix(*(other(each) if coded else each for each, coded in zip(inputs, views)), **more)

    patch.setattr(native, "mix", planted)


def exponents_of_values_are_read_for_keys(patch: pytest.MonkeyPatch) -> None:
    give(patch, lambda view: replace(view, key_exponents=view.value_exponents))


def exponents_of_the_head_before_are_read(patch: pytest.MonkeyPatch) -> None:
    give(patch, lambda view: replace(view, key_exponents=view.key_exponents.roll(1, -1)))


def exponents_of_the_token_before_are_read(patch: pytest.MonkeyPatch) -> None:
    give(patch, lambda view: replace(view, value_exponents=view.value_exponents.roll(1, 1)))


def floats_of_eight_bits_are_read_as_integers(patch: pytest.MonkeyPatch) -> None:
    give(patch, lambda view: replace(view, values=view.values.view(torch.int8), keys=view.keys.view(torch.int8)))


PLANTS = [
    exponents_of_values_are_read_for_keys,
    exponents_of_the_head_before_are_read,
    exponents_of_the_token_before_are_read,
    floats_of_eight_bits_are_read_as_integers,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    scene, kind = Scene([200, 40]), torch.float8_e4m3fn
    scene.compare(kind=kind)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        scene.compare(kind=kind)
