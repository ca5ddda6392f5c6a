"""What `--disk` and `weft cache` do to the path that they are given: nothing, unless it is a file of this model."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES, FlakyBlocks
from weft.base.errors import InvalidOption, OptionError
from weft.memory.tiers.disk.file import DiskFile, open_existing, open_file
from weft.memory.tiers.disk.format import BLOCK, IDENTITY_BYTES, VERSION, DiskLayout, ModelPart, checksum, read_layout

SIZE = 100_000
OTHER_MODEL = replace(LAYOUT, identity=replace(LAYOUT.identity, weights=b"g" * 16))
OTHER_SIZE = DiskLayout.of(LAYOUT.identity, UNIT_BYTES, LAYOUT.size_bytes // 2)


def of_version(version: int) -> bytes:
    """Return the layout's first block as another version would write it, with the right checksums."""
    block = bytearray(LAYOUT.encode())
    block[8:12] = struct.pack("<I", version)
    for end in (88, 88 + 16 + IDENTITY_BYTES):
        block[end : end + 8] = struct.pack("<Q", checksum(bytes(block[:end])))
    return bytes(block)


OTHER_VERSION = of_version(VERSION + 1)


def file_of(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(0o600)

    return make


def link_to(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        target = path.with_name("target")
        make(target)
        path.symlink_to(target)

    return link


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


FOREIGN: dict[str, Callable[[Path], None]] = {
    "a text": file_of(b"precious".ljust(SIZE, b"!")),
    "a text longer than the tier": file_of(b"precious".ljust(LAYOUT.size_bytes + SIZE, b"!")),
    "a short text": file_of(b"precious"),
    "one byte": file_of(b"\0"),
    "zeros": file_of(bytes(SIZE)),
    "zeros longer than the tier": file_of(bytes(LAYOUT.size_bytes + SIZE)),
    "a tier cut off within its first block": file_of(LAYOUT.encode()[: BLOCK - 1]),
    "a tier with a damaged first block": file_of(b"\xff" + LAYOUT.encode()[1:]),
    "a tier of another version": file_of(OTHER_VERSION.ljust(SIZE, b"\0")),
    "another model's tier": file_of(OTHER_MODEL.encode().ljust(OTHER_MODEL.size_bytes, b"\0")),
    "another model's tier, cut off": file_of(OTHER_MODEL.encode()),
    "another rank's tier": file_of(replace(LAYOUT, part=ModelPart(1, 2)).encode()),
    "a tier of another size": file_of(OTHER_SIZE.encode()),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": bind_socket,
    "a link to an empty file": link_to(file_of(b"")),
    "a link to a tier": link_to(file_of(LAYOUT.encode())),
    "a link to a folder": link_to(Path.mkdir),
    "a link to a pipe": link_to(os.mkfifo),
    "a link to nothing": link_to(lambda path: None),
}
# Of any model, so `weft cache` may look at them.
TIERS = {"another model's tier", "another model's tier, cut off", "another rank's tier", "a tier of another size"}


def seen(folder: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Return what a caller can see of every path in a folder, except when it was read."""
    found = {}
    for path in folder.iterdir():
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[path.name] = facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns, content
    return found


def check_refused(name: str, folder: Path) -> None:
    FOREIGN[name](folder / "tier")
    before = seen(folder)
    with pytest.raises(InvalidOption, match="disk"):
        open_file(folder / "tier", LAYOUT)
    assert seen(folder) == before


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
