"""What `--disk` and `weft cache` do to the path that they are given: nothing, unless it is a file of this model."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from random import Random

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, FlakyBlocks
from tests.support.tiers.disk_opening import (
    FOREIGN,
    OTHER_SIZE,
    OTHER_VERSION,
    check_refused,
    file_of,
    of_version,
    seen,
)
from weft.base.errors import InvalidOption, OptionError
from weft.memory.tiers.disk.file import DiskFile, open_existing, open_file
from weft.memory.tiers.disk.format import VERSION, read_layout

# Of any model, so `weft cache` may look at them.
TIERS = {"another model's tier", "another model's tier, cut off", "another rank's tier", "a tier of another size"}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_path_that_is_not_this_models_file_is_refused_and_nothing_of_it_changes(name: str, tmp_path: Path) -> None:
    check_refused(name, tmp_path)


@pytest.mark.parametrize("name", FOREIGN)
def test_looking_at_a_path_changes_nothing_of_it(name: str, tmp_path: Path) -> None:
    FOREIGN[name](tmp_path / "tier")
    before = seen(tmp_path)
    try:
        file = open_existing(tmp_path / "tier")
    except OptionError:
        pass
    else:
        assert name in TIERS
        file.close()
    assert seen(tmp_path) == before


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 48, 56, 64, 88, 90])
def test_a_file_whose_first_block_was_damaged_anywhere_is_no_tier(byte: int, tmp_path: Path) -> None:
    block = bytearray(LAYOUT.encode())
    block[byte] ^= 1
    file_of(bytes(block))(tmp_path / "tier")
    with pytest.raises(OptionError, match="is no disk tier of this version"):
        open_existing(tmp_path / "tier")
    with pytest.raises(InvalidOption, match="is no disk tier of this version"):
        open_file(tmp_path / "tier", LAYOUT)


def test_a_tier_of_another_version_is_whole_and_no_tier_of_this_one() -> None:
    assert read_layout(of_version(VERSION)) == LAYOUT
    assert read_layout(OTHER_VERSION) is None


def test_a_device_is_refused_without_opening_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *given: pytest.fail("opened"))
    with pytest.raises(InvalidOption, match="must be a file of this user with mode 600"):
        open_file(Path(os.devnull), LAYOUT)


def test_a_file_that_another_process_has_locked_stays_as_it_is(tmp_path: Path) -> None:
    file_of(b"")(tmp_path / "tier")
    before = seen(tmp_path)
    with (tmp_path / "tier").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        for opened in (lambda path: open_file(path, LAYOUT), open_existing):
            with pytest.raises(InvalidOption, match="in use by another process"):
                opened(tmp_path / "tier")
    assert seen(tmp_path) == before


def test_an_empty_file_becomes_a_tier(tmp_path: Path) -> None:
    file_of(b"")(tmp_path / "tier")
    open_file(tmp_path / "tier", LAYOUT).close()
    assert (tmp_path / "tier").stat().st_size == LAYOUT.size_bytes
    open_file(tmp_path / "tier", LAYOUT).close()


def test_a_file_that_was_killed_before_it_had_its_size_is_taken_up_again(tmp_path: Path) -> None:
    file_of(LAYOUT.encode())(tmp_path / "tier")
    open_file(tmp_path / "tier", LAYOUT).close()
    assert (tmp_path / "tier").stat().st_size == LAYOUT.size_bytes


def test_a_file_without_room_may_get_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(file: int, offset: int, size: int) -> None:
        os.truncate(file, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(InvalidOption, match="does not fit"):
            open_file(tmp_path / "tier", LAYOUT)
    open_file(tmp_path / "tier", OTHER_SIZE).close()


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_of_power_while_a_file_is_made_leaves_one_that_can_be_made(seed: int) -> None:
    class Interrupted(Exception):
        pass

    def interrupt() -> None:
        raise Interrupted

    random, blocks = Random(seed), FlakyBlocks(LAYOUT.size_bytes)
    blocks.sync = interrupt  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        DiskFile(blocks, LAYOUT)
    del blocks.sync
    blocks.lose_power(random)
    DiskFile(blocks, LAYOUT)
    blocks.lose_power(random)
    assert DiskFile(blocks, LAYOUT).damaged == 0
