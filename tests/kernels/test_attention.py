"""Paged attention equals a dense one over each row's own positions, whatever else pages and batches hold."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.attention import CELL, Scene, assert_equal, check_masks_and_reads_stay_bounded_by_the_window
from tests.support.kernels.operations import PLAIN
from weft.kernels.cpu import paged_reads
from weft.kernels.cpu.paged_reads import PaddedRead, RowRead, SharedRead

MIXES = {
    "one decode": [(100, 101)],
    "first token ever": [(0, 1)],
    "one prompt": [(0, 130)],
    "a prompt that goes on": [(70, 200)],
    "decodes of many lengths": [(0, 1), (63, 64), (64, 65), (200, 201), (5, 6)],
    "decodes and prompts": [(199, 200), (64, 65), (0, 65), (127, 190), (10, 12)],
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 1, 17, 64, 70, 100, 1000])
@pytest.mark.parametrize("mix", MIXES)
def test_paged_attention_equals_a_dense_one(mix, window, options):
    assert_equal(Scene(MIXES[mix], window), **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 1, 17, 100])
def test_the_plain_definition_equals_a_dense_one(window, options):
    assert_equal(Scene(MIXES["decodes and prompts"], window, operations=PLAIN), **OPTIONS[options])


@pytest.mark.parametrize("window", [None, 8, 70])
@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_of_queries_change_nothing(monkeypatch, window, options):
    monkeypatch.setattr(paged_reads, "QUERY_BLOCK", 17)
    assert_equal(Scene([(30, 31), (0, 100), (90, 170)], window), **OPTIONS[options])


@pytest.mark.parametrize("padded_tokens", [0, 100, 1000])
@pytest.mark.parametrize("window", [None, 20, 150])
def test_decodes_side_by_side_equal_decodes_one_by_one(monkeypatch, padded_tokens, window):
    monkeypatch.setattr(paged_reads, "PADDED_TOKENS", padded_tokens)
    assert_equal(Scene([(150, 151), (3, 4), (64, 65), (190, 191)], window, extra_columns=2))


@pytest.mark.parametrize("padded_tokens", [0, 512])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_common_beginning_read_once_equals_reading_it_for_each(monkeypatch, padded_tokens, options):
    monkeypatch.setattr(paged_reads, "PADDED_TOKENS", padded_tokens)
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(150, 151), (128, 129), (200, 201), (170, 210)], None, shared=128)
    reads = scene.reads()
    assert [type(read) for read in reads] == [SharedRead, RowRead]
    assert len(reads[0].pages) == 2
    assert_equal(scene, **OPTIONS[options])


def test_rows_share_only_what_they_begin_with(monkeypatch):
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(150, 151), (140, 141), (90, 91), (100, 101)], None, shared=64)
    # The third row has pages of its own instead.
    scene.tables[2][0] = next(p for p in range(scene.pages) if all(p not in table for table in scene.tables))
    scene.keys[2][:64] += 1
    scene.view = scene._fill_pages()
    reads = scene.reads()
    assert [type(read) for read in reads] == [SharedRead, RowRead]
    assert reads[0].tokens.tolist() == [0, 1, 3]
    assert_equal(scene)


def test_the_open_cell_is_never_read_as_a_common_beginning(monkeypatch):
    monkeypatch.setattr(paged_reads, "SHARING_PAGES", 1)
    scene = Scene([(64, 65), (127, 128)], None, shared=64)
    scene.tables[1] = scene.tables[0]
    reads = scene.reads()
    assert len(reads[0].pages) == 1


@pytest.mark.parametrize("window", [None, 70])
def test_what_else_is_in_the_batch_changes_nothing(window):
    rows = [(199, 200), (64, 65), (0, 65), (127, 190)]
    together = Scene(rows, window)
    parts = together.paged().split([end - start for start, end in rows])
    for row, part in enumerate(parts):
        alone = Scene(rows, window)
        for name in ("rows", "keys", "values", "queries", "tables"):
            setattr(alone, name, getattr(alone, name)[row : row + 1])
        torch.testing.assert_close(alone.paged(), part, rtol=0, atol=1e-6)


def test_masks_and_reads_stay_bounded_by_the_window():
    check_masks_and_reads_stay_bounded_by_the_window()


def test_decodes_read_only_their_windows_pages():
    scene = Scene([(1000, 1001), (1500, 1501)], 100)
    [read] = scene.reads()
    assert isinstance(read, PaddedRead)
    assert len(read.pages) == 2 * 3


def test_bfloat16_stays_near_the_dense_reference():
    assert_equal(Scene(MIXES["decodes and prompts"], 70, dtype=torch.bfloat16), tolerance=0.05, sinks=True)


def test_new_keys_and_values_are_in_their_pages():
    scene = Scene([(60, 70)], None)
    scene.paged()
    for position in range(70):
        page = scene.tables[0][position // CELL]
        torch.testing.assert_close(scene.view.keys[page, position % CELL], scene.keys[0][position])
        torch.testing.assert_close(scene.view.values[page, position % CELL], scene.values[0][position])
