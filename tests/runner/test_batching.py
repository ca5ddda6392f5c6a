"""Plans into batches: what is uploaded, and that it says what the plan says."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.operations import CPU, ssd_memory
from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from weft.device import upload as uploading
from weft.device.upload import upload
from weft.kernels.cpu.index_building import indices
from weft.kernels.interface import Batch
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

FULL = AttentionMemory(1, 8, "float32")
WINDOWED = AttentionMemory(1, 8, "float32", window=10)
SHORT = short_conv_memory(4, 3, "float32")
MATRIX = ssd_memory(2, 4, 4, 1, 16, 4, "float32")
BOARD = torch.arange(100, 200)


def build(rows: list[Row], memories: tuple = (FULL, WINDOWED, MATRIX), captures=(), **options) -> Batch:
    options = {"cell": 8} | options
    return build_batch(make_plan(rows, captures), MemorySpec(memories, **options), BOARD, "cpu", CPU)


def tensors_of(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [t for field in fields(value) for t in tensors_of(getattr(value, field.name))]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, tuple) else []


def mixed_rows() -> list[Row]:
    return [
        Row(9, 10, read_slot=3, tail=1, seat=5, from_board=1, pages=[4, 7], window_pages=[11, 13]),
        Row(0, 1, tail=2, seat=6, tokens=[42], pages=[5], window_pages=[14]),
        Row(14, 26, read_slot=2, tail=0, seat=7, pages=[1, 2, 3, 6], window_pages=[15, 16, 17, 18]),
        Row(
            30,
            33,
            read_slot=1,
            tail=3,
            seat=8,
            from_board=1,
            pages=range(20, 25),
            window_pages=[31, 32],
            window_first=3,
        ),
    ]


def test_all_tensors_come_from_one_upload():
    batch = build(mixed_rows(), captures=[Capture(2, 16, 0), Capture(3, 32, 1)])
    tensors = tensors_of(batch)
    sent = [tensor for tensor in tensors if not any(tensor is kept for kept in kept_on_the_host(batch))]
    assert len(sent) > 15
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1


def kept_on_the_host(batch: Batch) -> list[Tensor]:
    lists = (batch.full, batch.windowed)
    return [batch.host_start, batch.host_first, *(t for p in lists for t in (p.host_bounds, p.host_first_position))]


def test_plan_is_left_as_it_is():
    plan = make_plan(mixed_rows())
    tokens = plan.tokens.copy()
    build_batch(plan, MemorySpec((FULL, WINDOWED, MATRIX), cell=8), BOARD, "cpu", CPU)
    assert (plan.tokens == tokens).all()


def test_first_tokens_come_from_the_board_where_the_plan_says_so():
    batch = build(mixed_rows())
    assert batch.token_ids.tolist() == [105, 42, *range(14, 26), 108, 31, 32]


def test_tokens_and_rows_are_where_the_plan_says():
    batch = build(mixed_rows())
    assert (batch.tokens, batch.rows, batch.decodes) == (17, 4, 2)
    assert batch.positions.tolist() == [9, 0, *range(14, 26), 30, 31, 32]
    assert batch.start.tolist() == batch.host_start.tolist() == [9, 0, 14, 30]
    assert batch.first.tolist() == batch.host_first.tolist() == [0, 1, 2, 14, 17]
    assert batch.first_piece.tolist() == [0, 3, 5]
    assert batch.piece_position.tolist() == [8, 16, 24, 24, 32]


def test_keys_are_written_to_the_page_of_their_cell():
    batch = indices(build(mixed_rows()))
    assert batch.full.write_page.tolist() == [7, 5, *[2] * 2, *[3] * 8, *[6] * 2, 23, 23, 24]
    assert batch.full.write_offset.tolist() == [1, 0, 6, 7, *range(8), 0, 1, 6, 7, 0]
    assert batch.full.first_position.tolist() == [0, 0, 0, 0]
    assert batch.windowed.write_page.tolist() == [13, 14, *[16] * 2, *[17] * 8, *[18] * 2, 31, 31, 32]
    assert batch.windowed.write_offset.tolist() == batch.full.write_offset.tolist()
    assert batch.windowed.first_position.tolist() == [0, 0, 0, 24]
    assert batch.full.table.tolist()[0] == [4, 7, *[NOWHERE] * 3]


@pytest.mark.parametrize(
    ("memories", "present"),
    [
        ((FULL,), {"full"}),
        ((WINDOWED,), {"windowed"}),
        ((SHORT, FULL), {"full", "convolution"}),
        ((MATRIX,), {"decodes", "groups", "convolution"}),
    ],
)
def test_a_batch_holds_only_what_the_model_needs(memories, present):
    batch = indices(build(mixed_rows(), memories))
    names = {"full", "windowed", "decodes", "groups", "convolution"}
    assert {name for name in names if getattr(batch, name)} == present


def test_only_the_leading_rows_of_one_token_are_decodes():
    batch = build([Row(3, 4), Row(5, 8, tail=1), Row(7, 8, tail=2)], (MATRIX,))
    assert batch.decodes == indices(batch).decodes.rows == 1
    assert [group.rows for group in indices(batch).groups] == [2]


def test_rows_within_a_group_are_ordered_by_their_pieces():
    rows = [Row(0, 8, tail=0), Row(7, 24, 1, tail=1), Row(8, 17, 2, tail=2), Row(0, 9, tail=3)]
    (group,) = indices(build(rows, (MATRIX,))).groups
    assert [cell.tail for cell in group.cells] == [1, 2, 3, 0]
    assert [(rank.rows, rank.continuing) for rank in group.ranks] == [(4, 3), (3, 1), (1, 0)]


def test_a_checkpoint_exists_only_behind_the_first_cell():
    rows = [Row(7, 8, read_slot=3), Row(8, 9, read_slot=3, tail=1), Row(2, 7, tail=2)]
    batch = indices(build(rows, (MATRIX,)))
    assert [cell.slot for cell in batch.decodes.cells] == [None, 3]
    assert [cell.slot for cell in batch.groups[0].cells] == [None]


def test_captures_reach_the_piece_that_ends_there():
    captures = [Capture(0, 8, 5), Capture(1, 16, 6), Capture(2, 16, 7), Capture(2, 32, 8)]
    batch = indices(build([Row(7, 8), Row(3, 17, tail=1), Row(9, 32, 0, tail=2)], (MATRIX,), captures))
    assert batch.decodes.captures == ((0, 5),)
    (group,) = batch.groups
    assert [cell.tail for cell in group.cells] == [1, 2]
    assert [rank.captures for rank in group.ranks] == [((1, 7),), ((0, 6),), ((1, 8),)]


@st.composite
def plans_of_rows(draw) -> tuple[list[Row], int]:
    room = draw(st.integers(0, 9))
    spans = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=20))
    spans.sort(key=lambda span: span[1] > 1)
    return [Row(start, start + length, 0, tail) for tail, (start, length) in enumerate(spans)], room


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(plans_of_rows())
def test_every_token_is_computed_once_and_every_needed_one_stays(case):
    rows, room = case
    batch = build(rows, (MATRIX,), draft_room=room)
    ring = MemorySpec((MATRIX,), 8, room).ring(MATRIX, MATRIX.tail[-1])
    assert 8 + room <= ring < 16 + room
    computed, kept = list(range(batch.decodes)), set()
    for group in indices(batch).groups:
        for rank in group.ranks:
            computed += range(*rank.span) if rank.span is not None else rank.real_token.tolist()
            inside = set(range(*rank.span) if rank.span is not None else rank.real_token.tolist())
            assert rank.stays == bool(inside & set(group.writes.token.tolist()))
        kept |= {
            tuple(write)
            for write in zip(*(t.tolist() for t in (group.writes.tail, group.writes.ring, group.writes.token)))
        }
    assert sorted(computed) == list(range(batch.tokens))
    assert len({(tail, ring) for tail, ring, _ in kept}) == len(kept), "no two tokens at one place"
    for row, first in list(zip(rows, batch.host_first.tolist()))[batch.decodes :]:
        # Any later start that may come: at the end, or so many tokens before it.
        for start in range(max(row.start, row.end - room), row.end + 1):
            for position in range(max(row.start, start - start % 8), start):
                assert (row.tail, position % ring, first + position - row.start) in kept


def test_upload_keeps_shapes_values_and_kinds():
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array([True, False, True]),
        "c": np.array([0.5, -1.5], np.float32),
        "d": np.zeros((0, 4), np.int64),
        "e": np.array([[False]]),
    }
    sent = upload(arrays, "cpu")
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "a": torch.int64, "b": torch.bool, "c": torch.float32, "d": torch.int64, "e": torch.bool,
    }  # fmt: skip
    assert all(
        sent[name].shape == array.shape and sent[name].tolist() == array.tolist() for name, array in arrays.items()
    )


def test_uploaded_arrays_begin_where_kernels_load_fast(monkeypatch):
    monkeypatch.setattr(uploading, "to_device", lambda packed, device: torch.from_numpy(packed))
    lengths = {"a": 3, "b": 1, "c": 7, "d": 4, "e": 2}
    kinds = (np.int32, np.int64, np.float32, np.bool_, np.uint8)
    arrays = {f"{name}{kind.__name__}": np.ones(n, kind) for kind in kinds for name, n in lengths.items()}
    sent = upload(arrays, "cuda", widen=False)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == 1
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in sent.values())
    assert all(sent[name].tolist() == array.tolist() for name, array in arrays.items())
