"""Records survive a restart, are overwritten when they are removed, and nothing else passes for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from weft.base.errors import OptionError
from weft.server.stored.file import BLOCK, RECORD, RecordFile
from weft.server.stored.gaps import Gaps


def contents(path: Path) -> dict[int, bytes]:
    file = RecordFile(path, 1 << 20)
    found = dict(file.records())
    file.close()
    return found


def read(path: Path) -> tuple[dict[int, bytes], str]:
    try:
        return contents(path), ""
    except OptionError as error:
        return {}, str(error)


def test_random_records_survive_restarts_and_removed_ones_leave_no_byte(tmp_path: Path) -> None:
    random, path = Random(0), tmp_path / "responses"
    kept: dict[int, bytes] = {}
    for _ in range(8):
        file = RecordFile(path, 1 << 20)
        assert dict(file.records()) == kept
        for _ in range(20):
            if kept and random.random() < 0.45:
                place = random.choice(list(kept))
                gone = kept.pop(place)
                file.erase(place)
                assert gone not in path.read_bytes()
            else:
                payload = random.randbytes(random.choice([16, 4000, 9000, 30000]))
                place = file.add(payload)
                assert place not in kept
                kept[place] = payload
        file.close()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_full_file_takes_no_more_until_there_is_a_gap(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "responses", 6 * BLOCK)
    places = [file.add(b"a" * BLOCK) for _ in range(3)]
    assert places == [1, 3, None]
    file.erase(1)
    # The smallest gap that has room, and then the other one.
    assert [file.add(b"b") for _ in range(2)] == [5, 1]
    assert file.add(b"b" * BLOCK) is None


def test_gaps_are_found_and_joined_as_in_a_map_of_all_blocks() -> None:
    """Against a list of blocks: what is taken was free, and nothing is refused for which there is a gap."""
    random = Random(2)
    for _ in range(60):
        size = random.randint(1, 60)
        gaps, free, held = Gaps(), [True] * size, {}
        gaps.give(0, size)
        for _ in range(120):
            if held and random.random() < 0.5:
                start = random.choice(list(held))
                blocks = held.pop(start)
                gaps.give(start, blocks)
                free[start : start + blocks] = [True] * blocks
                continue
            blocks = random.randint(1, 12)
            found = gaps.take(blocks)
            if found is None:
                assert "1" * blocks not in "".join(str(int(each)) for each in free)
                continue
            assert free[found : found + blocks] == [True] * blocks
            free[found : found + blocks] = [False] * blocks
            held[found] = blocks


def test_a_write_looks_at_no_other_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(tmp_path / "responses", 1 << 24)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)

    class Unread(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all records are looked at")

    file._blocks_of = Unread()
    places = [file.add(b"x" * 10) for _ in range(200)]
    for place in places[::2]:
        file.erase(place)
    assert sorted(file.add(b"y" * 10) for _ in range(100)) == places[::2]
    assert file.add(b"z" * 2 * BLOCK) == places[-1] + 1


def test_a_file_that_was_larger_before_keeps_its_records_and_grows_no_more(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    file = RecordFile(path, 12 * BLOCK)
    places = [file.add(b"a") for _ in range(10)]
    file.erase(places[1])
    file.close()
    file = RecordFile(path, 4 * BLOCK)
    assert [place for place, _ in file.records()] == [places[0], *places[2:]]
    file.erase(places[-1])
    assert [file.add(b"b") for _ in range(2)] == [places[1], None]
    file.close()


def test_what_is_no_record_is_overwritten_when_the_file_is_opened(tmp_path: Path) -> None:
    """A torn write, and a client's text that looks like a record of another key."""
    path = tmp_path / "responses"
    file = RecordFile(path, 1 << 20)
    kept, torn = file.add(b"kept"), file.add(b"torn" * 3000)
    file.close()
    forged = RECORD + (6).to_bytes(8, "little") + bytes(32) + b"forged"
    with path.open("r+b") as raw:
        raw.seek(torn * BLOCK + 60)
        raw.write(b"X")
        raw.seek((torn + 1) * BLOCK)
        raw.write(forged)
    assert contents(path) == {kept: b"kept"}
    data = path.read_bytes()
    assert b"torn" not in data
    assert b"forged" not in data


def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path, random = tmp_path / "responses", Random(1)
    file = RecordFile(path, 1 << 20)
    payloads = {file.add(random.randbytes(size)): size for size in (10, 5000, 100)}
    file.close()
    whole = path.read_bytes()
    for _ in range(200):
        data = bytearray(whole[: random.randint(1, len(whole))] if random.random() < 0.3 else whole)
        for _ in range(random.randint(0, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        found, error = read(path)
        assert found.keys() <= payloads.keys()
        assert "\n" not in error


def test_a_file_that_is_in_use_or_no_file_of_responses_is_refused(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "responses", 1 << 20)
    with pytest.raises(OptionError, match="cannot open"):
        RecordFile(tmp_path / "responses", 1 << 20)
    file.close()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(OptionError, match="is no file of responses"):
        RecordFile(tmp_path / "text", 1 << 20)
    (tmp_path / "link").symlink_to(tmp_path / "responses")
    with pytest.raises(OptionError, match="cannot open"):
        RecordFile(tmp_path / "link", 1 << 20)
