"""Files and links that `--disk` must refuse."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiers.disk_blocks import LAYOUT, UNIT_BYTES
from weft.base.errors import InvalidOption
from weft.memory.tiers.disk.file import open_file
from weft.memory.tiers.disk.format import BLOCK, IDENTITY_BYTES, VERSION, DiskLayout, ModelPart, checksum

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
