"""Writes whole files so that a crash leaves the old one or the new one, and removes them with their contents."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read. It replaces the old one once it is on the disk."""
    write_parts(path, (data,))


def write_parts(path: Path, parts: Iterable[bytes]) -> int:
    """Write a file as `write_whole` does, part by part; return its size."""
    size = 0
    other = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    file = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for data in parts:
            view, size = memoryview(data), size + len(data)
            while view:
                view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    other.replace(path)
    return size


ZEROS = bytes(1 << 20)


def overwrite(path: Path) -> None:
    """Overwrite a file with zeros, and remove it once they are on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        left = os.fstat(file).st_size
        while left > 0:
            left -= os.write(file, ZEROS[:left])
        os.fsync(file)
    finally:
        os.close(file)
    path.unlink()


def sync_folder(path: Path) -> None:
    """Return when new, renamed and removed names of a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
