"""Files are asked for in the order of use, up to a number of bytes ahead, and no further than where loading ends."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from safetensors.torch import save_file

from weft.models import reading_ahead
from weft.models.reading_ahead import FilePiece, ReadAhead, places_in

SIZE, AHEAD = 8, 3


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Ten tensors of one piece each, three of which may be asked for before they are needed."""
    monkeypatch.setattr(reading_ahead, "PIECE_BYTES", SIZE)
    monkeypatch.setattr(reading_ahead, "AHEAD_BYTES", AHEAD * SIZE)
    return ReadAhead((str(n), FilePiece(tmp_path / "file", n * SIZE, SIZE)) for n in range(10))


def test_places_are_those_of_the_bytes(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int8), "c": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    content = (tmp_path / "x.safetensors").read_bytes()
    found = places_in(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, place in found.items():
        assert content[place.start : place.start + place.size] == tensors[name].numpy().tobytes()


@pytest.mark.parametrize("needed", [0, 1, 4, 9])
def test_as_much_is_asked_for_as_allowed_before_the_tensor_that_is_needed(few, needed):
    few.reached(str(needed))
    pieces, allowed = few.pieces(), min(10, needed + AHEAD)
    assert [piece.start for piece in islice(pieces, allowed)] == [n * SIZE for n in range(allowed)]
    # Another one would wait until a later tensor is needed, or until the end.
    few.end()
    assert list(pieces) == []


def test_a_tensor_that_was_needed_before_changes_nothing(few):
    few.reached("5")
    few.reached("2")
    few.reached("not in any file")
    assert len(list(islice(few.pieces(), 5 + AHEAD))) == 5 + AHEAD


def test_large_tensors_are_asked_for_in_pieces(few, tmp_path):
    one = ReadAhead([("x", FilePiece(tmp_path / "file", 100, 2 * SIZE + 3))])
    pieces = list(one.pieces())
    assert [(piece.start, piece.size) for piece in pieces] == [(100, SIZE), (100 + SIZE, SIZE), (100 + 2 * SIZE, 3)]


def test_a_file_that_is_gone_is_left_to_the_loader(tmp_path):
    with reading_ahead.reading_ahead([("x", FilePiece(tmp_path / "none", 0, SIZE))]) as ahead:
        ahead.reached("x")
