"""Checks the files of a downloaded folder against the checksums that the hub gave them.

In the hub's cache a file is a link to `blobs/NAME`, and the name is the checksum: SHA-256 of large files, and of others
the id that Git gives to their content. So a folder can be checked without a network. Files elsewhere have no checksum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

SHA256, GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
READ_BYTES = 1 << 22


def blobs_of(folder: Path) -> list[Path]:
    """Return the files of a snapshot whose names are their checksums."""
    found = {path.resolve() for path in folder.rglob("*") if path.is_symlink() and path.is_file()}
    # Nothing but the hub's cache is called that: other files have names of other origin.
    blobs = [blob for blob in found if blob.parent.name == "blobs"]
    return sorted(blob for blob in blobs if SHA256.fullmatch(blob.name) or GIT.fullmatch(blob.name))


def damaged(folder: Path, tell: Callable[[int], object] = lambda count: None) -> Iterator[Path]:
    """Yield the files of a snapshot whose content differs from their checksum; `tell` gets the bytes of each read."""
    return (blob for blob in blobs_of(folder) if checksum(blob, tell) != blob.name)


def checksum(blob: Path, tell: Callable[[int], object] = lambda count: None) -> str:
    if SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    with blob.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            tell(len(block))
    return digest.hexdigest()
