"""Layers rotate by the rotary positions of a step; memory follows the places of its tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.kernels.native_rows import needs_compiler
from tests.support.kernels.operations import CPU, GPU, GPU_ROWS, NATIVE, PLAIN
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView, Store
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.interface import Batch, Operations
from weft.kernels.native.replay import Replays
from weft.kernels.rotary import RotaryKind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.models.layers.rotary import Rotary
from weft.runner.batching import build_batch

PACKAGES = {"plain": PLAIN, "cpu": CPU, "native": NATIVE, "cuda rows": GPU_ROWS, "cuda": GPU}
CELL, HEADS, KV_HEADS, DIM = 16, 4, 2, 16
FORM = AttentionForm(HEADS, KV_HEADS, DIM, 0.3, None, None)
SPEC = MemorySpec((AttentionMemory(KV_HEADS, DIM, "float32"),), cell=CELL)
# Rows of one token, and such that begin, continue and end anywhere. Their pages, in no order, and what fills a table.
DECODES = {(37, 38): (5, 1, 8), (16, 17): (3, 9, 0), (15, 16): (12, 0, 0)}
PROMPTS = {(0, 5): (2, 0, 0), (14, 35): (11, 4, 7)}
LAYER = Rotary(RotaryKind(DIM), torch.float32)


def batch_of(rows: dict[tuple[int, int], tuple[int, ...]], operations: Operations, shifted: bool) -> Batch:
    """Return a step whose tokens are rotated by positions far from their places, as those after an image are."""
    plan = make_plan([Row(*span, pages=list(pages)) for span, pages in rows.items()])
    batch = build_batch(plan, SPEC, torch.zeros(9, dtype=torch.int64), "cpu", operations)
    return replace(batch, rotary=rotary_of(batch)) if shifted else batch


def rotary_of(batch: Batch) -> Tensor:
    return (batch.positions * 7 + 3) % 100


def memory() -> tuple[Store, AttentionView]:
    store = Store(SPEC, 64 * SPEC.page_bytes, "cpu")
    view = store.views[0]
    assert isinstance(view, AttentionView)
    random = torch.Generator().manual_seed(1)
    for part in (view.keys, view.values):
        part.copy_(torch.randn(part.shape, generator=random))
    return store, view


def projected_of(batch: Batch) -> Tensor:
    return torch.randn(batch.tokens, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(2))


def attend(batch: Batch, view: AttentionView, projected: Tensor) -> Tensor:
    return batch.operations.attend(AttentionInputs(projected, FORM, rotation=LAYER(batch)), batch, view)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate lines of heads as complex numbers."""
    angle = positions.double()[:, None, None] * LAYER.frequency.double()
    turn, half = torch.polar(torch.ones_like(angle), angle), x.shape[-1] // 2
    found = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([found.real, found.imag], -1)


def expected(batch: Batch, view: AttentionView, projected: Tensor, positions: Tensor) -> Tensor:
    """Write pages and return outputs, token by token: rotated by `positions`, seen and kept by places."""
    heads = projected.unflatten(-1, (-1, DIM))
    queries, keys = turned(heads[:, :HEADS], positions), turned(heads[:, HEADS : HEADS + KV_HEADS], positions)
    values, plan = heads[:, HEADS + KV_HEADS :], batch.host.plan
    places = [(row, at) for row in range(batch.rows) for at in range(plan.start[row], plan.end[row])]
    for token, (row, at) in enumerate(places):
        page = int(plan.page_table[row, at // CELL])
        view.keys[page, at % CELL], view.values[page, at % CELL] = keys[token].float(), values[token]
    found = []
    for token, (row, at) in enumerate(places):
        pages = plan.page_table[row, : at // CELL + 1].tolist()
        seen, kept = (part[pages].flatten(0, 1)[: at + 1].double() for part in (view.keys, view.values))
        seen, kept = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (seen, kept))
        weights = torch.softmax(FORM.scale * torch.einsum("hd,phd->hp", queries[token], seen), -1)
        found.append(torch.einsum("hp,phd->hd", weights, kept).flatten())
    return torch.stack(found).float()


@pytest.mark.parametrize("rows", [DECODES, DECODES | PROMPTS], ids=["decodes", "prompts"])
@pytest.mark.parametrize("package", PACKAGES)
def test_rotation_follows_the_rotary_positions_and_memory_the_places(package: str, rows) -> None:
    batch = batch_of(rows, PACKAGES[package], shifted=True)
    projected, (_, view), (_, other) = projected_of(batch), memory(), memory()
    wanted = expected(batch, other, projected, rotary_of(batch))
    torch.testing.assert_close(attend(batch, view, projected), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(view.keys, other.keys, rtol=1e-4, atol=1e-4)
    assert view.values.equal(other.values)


@pytest.mark.parametrize("package", PACKAGES)
def test_without_rotary_positions_places_are_taken(package: str) -> None:
    batch = batch_of(DECODES | PROMPTS, PACKAGES[package], shifted=False)
    projected, (_, view), (_, other) = projected_of(batch), memory(), memory()
    wanted = expected(batch, other, projected, batch.positions)
    torch.testing.assert_close(attend(batch, view, projected), wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted, expected(batch, other, projected, rotary_of(batch)), atol=1e-2)


@needs_compiler
def test_a_recorded_step_rotates_by_the_positions_that_it_is_replayed_for() -> None:
    batch = batch_of(DECODES, NATIVE, shifted=False)
    projected, (_, view) = projected_of(batch), memory()
    replays = Replays(lambda step: attend(step, view, projected))
    replays(batch)
    assert None not in replays.steps.values(), "the step is recorded"
    for step in (batch_of(DECODES, NATIVE, shifted=True), batch, batch_of(DECODES, NATIVE, shifted=True)):
        _, other = memory()
        wanted = expected(step, other, projected, step.rotary_positions)
        torch.testing.assert_close(replays(step), wanted, rtol=1e-4, atol=1e-4)
