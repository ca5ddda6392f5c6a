"""The format of the disk tier's file: a superblock, one contiguous region of headers, then units in slabs.

    0            superblock: which model, which sizes
    4096         headers, one entry of 256 bytes for each place at which a unit may begin; zeros where there is none
    payload      units; the unit `i` of a kind begins at byte `i * padded[kind]`

A header names its unit, where it belongs in a sequence, and the checksum of its bytes, so each unit stands for itself.
Integers are little-endian. Nothing here does input or output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from weft.memory.arena import choose_slab_bytes
from weft.memory.captures import ORIGINS, Origin
from weft.memory.keys import Key
from weft.memory.kinds import Kind

BLOCK = 4096
ENTRY = 256
VERSION = 1
SUPER_MAGIC = b"WEFTTIER"
ENTRY_MAGIC = b"WFTU"
KINDS = (Kind.PAGE, Kind.WINDOW, Kind.STATE)
NO_PARENT = bytes(32)
# magic, version, kind, origin, unit, position, key, parent, tenant, payload bytes, payload checksum
_ENTRY = struct.Struct("<4sHBBQQ32s32s16sQQ")
# magic, version, bytes of an entry, fingerprint, slab bytes, slabs, payload bytes of a page, window page and state
_SUPER = struct.Struct("<8sII32sQQQQQ")
_SUM = struct.Struct("<Q")


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of a unit's or a header's bytes: XXH3, 64 bits."""
    return xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class UnitHeader:
    """What a unit is. `unit` is its index among those of its kind; `position` is the end of its cell in tokens."""

    kind: Kind
    unit: int
    position: int
    key: Key
    parent: Key | None
    tenant: bytes
    origin: Origin
    size: int
    checksum: int

    def encode(self) -> bytes:
        fields = _ENTRY.pack(
            ENTRY_MAGIC,
            VERSION,
            KINDS.index(self.kind),
            ORIGINS.index(self.origin),
            self.unit,
            self.position,
            self.key,
            self.parent or NO_PARENT,
            self.tenant,
            self.size,
            self.checksum,
        )
        padded = fields.ljust(ENTRY - _SUM.size, b"\0")
        return padded + _SUM.pack(checksum(padded))


def decode(entry: bytes | memoryview) -> UnitHeader | None:
    """Return the header of an entry, or None if it is damaged."""
    body = bytes(entry[: ENTRY - _SUM.size])
    if len(entry) != ENTRY or _SUM.unpack(entry[ENTRY - _SUM.size :])[0] != checksum(body):
        return None
    magic, version, kind, origin, unit, position, key, parent, tenant, size, found = _ENTRY.unpack_from(body)
    if magic != ENTRY_MAGIC or version != VERSION or kind >= len(KINDS) or origin >= len(ORIGINS):
        return None
    above = None if parent == NO_PARENT else parent
    return UnitHeader(KINDS[kind], unit, position, key, above, tenant, ORIGINS[origin], size, found)


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Where everything lies in a file for one model. `unit_bytes` are the bytes of units in memory."""

    fingerprint: bytes
    unit_bytes: Mapping[Kind, int]
    slab_bytes: int
    slabs: int

    @classmethod
    def of(cls, fingerprint: bytes, unit_bytes: Mapping[Kind, int], size_bytes: int) -> DiskLayout:
        """Return the layout of a file of up to `size_bytes`."""
        kept = {kind: unit_bytes[kind] for kind in KINDS if kind in unit_bytes}
        padded = {kind: _blocks(size) for kind, size in kept.items()}
        slab_bytes = choose_slab_bytes(padded, size_bytes)
        # Headers take at most this share of a slab.
        with_headers = slab_bytes + -(-slab_bytes // min(padded.values())) * ENTRY
        slabs = max(0, (size_bytes - 2 * BLOCK) // with_headers)
        return cls(fingerprint, kept, slab_bytes, slabs)

    @property
    def padded(self) -> dict[Kind, int]:
        """Bytes of a unit in the file, in whole blocks, as direct input and output need them."""
        return {kind: _blocks(size) for kind, size in self.unit_bytes.items()}

    @property
    def entries(self) -> int:
        return -(-self.slabs * self.slab_bytes // min(self.padded.values()))

    @property
    def payload_offset(self) -> int:
        return _blocks(BLOCK + self.entries * ENTRY)

    @property
    def size_bytes(self) -> int:
        return self.payload_offset + self.slabs * self.slab_bytes

    def offset_of(self, kind: Kind, unit: int) -> int:
        return self.payload_offset + unit * self.padded[kind]

    def entry_of(self, kind: Kind, unit: int) -> int:
        """Return the offset of a unit's header. Units do not overlap, so no two of them have the same."""
        return BLOCK + unit * self.padded[kind] // min(self.padded.values()) * ENTRY

    def encode(self) -> bytes:
        sizes = [self.unit_bytes.get(kind, 0) for kind in KINDS]
        body = _SUPER.pack(SUPER_MAGIC, VERSION, ENTRY, self.fingerprint, self.slab_bytes, self.slabs, *sizes)
        return (body + _SUM.pack(checksum(body))).ljust(BLOCK, b"\0")

    def headers(self, region: memoryview, offset: int) -> Iterator[UnitHeader | None]:
        """Yield the headers in a part of the file that begins at `offset`; None for each damaged one."""
        empty, padded = bytes(ENTRY), self.padded
        least, limit = min(padded.values()), self.slabs * self.slab_bytes
        for first in range(0, len(region), ENTRY):
            entry = region[first : first + ENTRY]
            if entry == empty:
                continue
            header = decode(entry)
            if header is None or header.size != self.unit_bytes.get(header.kind):
                yield None
                continue
            # A header stands for the unit that begins where its entry is.
            begin = header.unit * padded[header.kind]
            inside = begin + padded[header.kind] <= limit
            yield header if inside and BLOCK + begin // least * ENTRY == offset + first else None


def read_layout(block: bytes | memoryview) -> DiskLayout | None:
    """Return the layout that a superblock describes, or None if it is none."""
    body = bytes(block[: _SUPER.size])
    if len(block) < BLOCK or _SUM.unpack_from(block, _SUPER.size)[0] != checksum(body):
        return None
    magic, version, entry, fingerprint, slab_bytes, slabs, *sizes = _SUPER.unpack(body)
    if magic != SUPER_MAGIC or version != VERSION or entry != ENTRY:
        return None
    return DiskLayout(fingerprint, {k: s for k, s in zip(KINDS, sizes, strict=True) if s}, slab_bytes, slabs)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
