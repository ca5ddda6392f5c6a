"""A prefix in a file of its own, to ship it with a deployment: cells from the root down, and their resume points.

    0       one block: magic, version, the model's identity, bytes of each kind of unit, number of units; from byte
            2048 on, if the tokens are known: their number, those of the prompt, the tenant; at its end a signature
    4096    units, each a header of 256 bytes as in the disk tier's file, followed by its bytes
    end     the tokens, 4 bytes each, if they are known

Checksums find damage, not malice: a file is trusted like weights, or by its signature (`base/prefix_keys.py`). Reading
it executes nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from weft.base.errors import InvalidOption
from weft.memory.arena import Arena
from weft.memory.identity import Identity
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile
from weft.memory.tiers.disk.format import (
    BLOCK,
    ENTRY,
    IDENTITY_BYTES,
    KINDS,
    UnitHeader,
    checksum,
    decode,
    decode_identity,
    encode_identity,
)

MAGIC = b"WEFTPREF"
VERSION = 2
# magic, version, bytes of an entry, identity, bytes of a page, window page and state, number of units
_HEAD = struct.Struct(f"<8sII{IDENTITY_BYTES}sQQQQ")
_SUM = struct.Struct("<Q")
MOST_UNIT_BYTES = 1 << 32
TOKENS_AT = 2048
TOKENS_MAGIC = b"WEFTTOKN"
# magic, tokens, of which the first are the prompt's, digest of the tenant, checksum of the tokens
_TOKENS = struct.Struct("<8sQQ16sQ")
TOKEN_BYTES = 4
MOST_TOKENS = 1 << 24
# Units written to the disk tier's file at a time.
UNITS_PER_WRITE = 16


@dataclass(frozen=True, slots=True)
class PrefixTokens:
    """What a file says of its tokens: their number, those of the prompt before an answer, whose they are."""

    tokens: int
    prompt: int
    tenant: bytes
    checksum: int

    def encode(self) -> bytes:
        body = _TOKENS.pack(TOKENS_MAGIC, self.tokens, self.prompt, self.tenant, self.checksum)
        return body + _SUM.pack(checksum(body))


@dataclass(frozen=True, slots=True)
class PrefixHead:
    identity: Identity
    unit_bytes: Mapping[Kind, int]
    units: int
    tokens: PrefixTokens | None = None

    def encode(self) -> bytes:
        sizes = [self.unit_bytes.get(kind, 0) for kind in KINDS]
        body = _HEAD.pack(MAGIC, VERSION, ENTRY, encode_identity(self.identity), *sizes, self.units)
        block = (body + _SUM.pack(checksum(body))).ljust(TOKENS_AT, b"\0")
        return (block + (b"" if self.tokens is None else self.tokens.encode())).ljust(BLOCK, b"\0")


def read_tokens_head(block: bytes) -> PrefixTokens | None:
    """Return what the first block of a file says of its tokens; None if they are not known, or this is damaged."""
    body = block[TOKENS_AT : TOKENS_AT + _TOKENS.size]
    magic, tokens, prompt, tenant, found = _TOKENS.unpack(body)
    whole = _SUM.unpack_from(block, TOKENS_AT + _TOKENS.size)[0] == checksum(body)
    if magic != TOKENS_MAGIC or not whole or not 0 < prompt <= tokens <= MOST_TOKENS:
        return None
    return PrefixTokens(tokens, prompt, tenant, found)


def read_head(file: BinaryIO, name: str) -> PrefixHead:
    """Return what a prefix file says of itself; raises if it is none, or shorter than it says."""
    block = file.read(BLOCK)
    body = block[: _HEAD.size]
    if len(block) < BLOCK or _SUM.unpack_from(block, _HEAD.size)[0] != checksum(body):
        raise InvalidOption("import_from", f"{name} is no prefix file of this version")
    magic, version, entry, name_of_model, *sizes, units = _HEAD.unpack(body)
    identity = decode_identity(name_of_model)
    known = magic == MAGIC and version == VERSION and entry == ENTRY
    if identity is None or not known or max(sizes) > MOST_UNIT_BYTES:
        raise InvalidOption("import_from", f"{name} is no prefix file of this version")
    if os.fstat(file.fileno()).st_size < BLOCK + units * ENTRY:
        raise InvalidOption("import_from", f"{name} is truncated")
    found = {kind: size for kind, size in zip(KINDS, sizes, strict=True) if size}
    return PrefixHead(identity, found, units, read_tokens_head(block))


def chosen_units(file: DiskFile, prefix: bytes) -> list[UnitHeader]:
    """Return the units of the path to the one cell whose key begins with `prefix`, and of its resume points."""
    pages = {each.key: each for each in file.found if each.kind is Kind.PAGE}
    ends = [key for key in pages if key.startswith(prefix)]
    if len(ends) != 1:
        raise InvalidOption("prefix", f"must be the beginning of the key of one cell; {len(ends)} have {prefix.hex()}")
    path: list[UnitHeader] = []
    here: Key | None = ends[0]
    while here is not None:
        if here not in pages or len(path) > len(pages):
            raise InvalidOption("prefix", f"{prefix.hex()} is not whole in this file: a cell above it is missing")
        path.append(pages[here])
        here = pages[here].parent
    on_path = {each.key for each in path}
    return path[::-1] + [each for each in file.found if each.kind is not Kind.PAGE and each.key in on_path]


def export_prefix(file: DiskFile, prefix: bytes, target: Path) -> int:
    """Write a prefix to a new file that only this user can read; return the number of its units."""
    units = chosen_units(file, prefix)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidOption("export_to", f"{target} cannot be created: {error.strerror}; pass a new path") from error
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(PrefixHead(file.layout.identity, file.layout.unit_bytes, len(units)).encode())
            for header in units:
                payload = bytearray(header.size)
                file.read(header.kind, header.unit, header.key, memoryview(payload))
                out.write(header.encode())
                out.write(payload)
    except (DamagedUnit, OSError) as error:
        target.unlink()
        raise InvalidOption("export_to", f"{target} was not written: {error}") from error
    return len(units)


def read_units(file: BinaryIO, head: PrefixHead, name: str) -> Iterator[tuple[UnitHeader, bytes]]:
    """Yield the units of a prefix file; raises if one is damaged."""
    for number in range(head.units):
        header = decode(file.read(ENTRY))
        if header is None or header.size != head.unit_bytes.get(header.kind):
            raise InvalidOption("import_from", f"{name} is damaged at unit {number}; nothing after it was imported")
        payload = file.read(header.size)
        if len(payload) != header.size or checksum(payload) != header.checksum:
            raise InvalidOption("import_from", f"{name} is damaged at unit {number}; nothing after it was imported")
        yield header, payload


def import_prefix(file: DiskFile, source: Path) -> int:
    """Add the units of a prefix file that are not in the disk tier's file yet; return their number."""
    arena = Arena(file.layout.padded, file.layout.slabs * file.layout.slab_bytes)
    # An interrupted drop has left these; a unit that took their place would be erased with them.
    file.erase(file.doomed)
    for kind in file.layout.unit_bytes:
        arena.claim_all(kind, [each.unit for each in file.found if each.kind is kind])
    known = {(each.kind, each.key, each.position) for each in file.found}
    written = 0
    with source.open("rb") as opened:
        head = read_head(opened, str(source))
        if head.identity != file.layout.identity or head.unit_bytes != file.layout.unit_bytes:
            why = head.identity.difference(file.layout.identity) or "the sizes of units differ"
            raise InvalidOption(
                "import_from", f"{source} belongs to another model: {why}; export it from this one's file"
            )
        units = read_units(opened, head, str(source))
        new = ((header, data) for header, data in units if (header.kind, header.key, header.position) not in known)
        while batch := list(islice(new, UNITS_PER_WRITE)):
            file.write([(_placed(header, arena), memoryview(data)) for header, data in batch])
            written += len(batch)
    return written


def _placed(header: UnitHeader, arena: Arena) -> UnitHeader:
    unit = arena.take(header.kind)
    if unit is None:
        raise InvalidOption("import_from", "does not fit into the file; drop a tenant, or make a larger file")
    return replace(header, unit=unit)
