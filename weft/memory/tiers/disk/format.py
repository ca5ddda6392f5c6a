"""The format of the disk tier's file: a superblock, one contiguous region of headers, then units in slabs.

    0            superblock: whose states, which rank's part of the model, and which sizes
    4096         headers, one entry of 256 bytes for each place at which a unit may begin; zeros where there is none
    payload      units; the unit `i` of a kind begins at byte `i * padded[kind]`

A header names its unit, where it belongs in a sequence, and the checksum of its bytes, so each unit stands for itself.
Integers are little-endian. Nothing here does input or output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from weft.memory.arena import choose_slab_bytes
from weft.memory.captures import ORIGINS, Origin
from weft.memory.identity import MOST_REVISIONS, PART_BYTES, Identity
from weft.memory.keys import Key
from weft.memory.kinds import Kind

BLOCK = 4096
ENTRY = 256
VERSION = 2
SUPER_MAGIC = b"WEFTTIER"
ENTRY_MAGIC = b"WFTU"
# The header of a unit that was dropped, and whose bytes are still to be overwritten.
DOOMED_MAGIC = b"WFTD"
KINDS = (Kind.PAGE, Kind.WINDOW, Kind.STATE)
NO_PARENT = bytes(32)
# magic, version, kind, origin, unit, position, key, parent, tenant, payload bytes, payload checksum
_ENTRY = struct.Struct("<4sHBBQQ32s32s16sQQ")
# magic, version, bytes of an entry, fingerprint, slab bytes, slabs, payload bytes of a page, window page and state
_SUPER = struct.Struct("<8sII32sQQQQQ")
_SUM = struct.Struct("<Q")
# Behind its checksum: rank, ranks; then the identity in its parts, and a checksum of all that is before.
_PART = struct.Struct("<II")
# Digests of configuration, weights and layout, whether answers are exact, the numbers of what the code computes
_IDENTITY = struct.Struct(f"<{PART_BYTES}s{PART_BYTES}s{PART_BYTES}s?{MOST_REVISIONS}s")
IDENTITY_BYTES = _IDENTITY.size
# The same entry, for NumPy.
ENTRY_TYPE = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("kind", "u1"),
        ("origin", "u1"),
        ("unit", "<u8"),
        ("position", "<u8"),
        ("key", "V32"),
        ("parent", "V32"),
        ("tenant", "V16"),
        ("size", "<u8"),
        ("checksum", "<u8"),
        ("padding", "V128"),
        ("header_checksum", "<u8"),
    ]
)
EntryRows = NDArray[np.void]


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of a unit's or a header's bytes: XXH3, 64 bits."""
    return xxh3_64_intdigest(data)


def checksum_of_parts(parts: Iterable[memoryview]) -> int:
    """Return the checksum of the bytes of all parts, one after the other.

    >>> checksum_of_parts([memoryview(b"one"), memoryview(b"two")]) == checksum(b"onetwo")
    True
    """
    found = xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest()


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
class ModelPart:
    """Whose units a file holds: those of a whole model, or of one rank."""

    rank: int = 0
    ranks: int = 1

    def path(self, given: Path) -> Path:
        """Return the path of this part's file; the first rank's is the given one.

        >>> str(ModelPart(0, 2).path(Path("tier"))), str(ModelPart(1, 2).path(Path("tier")))
        ('tier', 'tier.rank1')
        """
        return given.with_name(f"{given.name}.rank{self.rank}") if self.rank else given

    def __str__(self) -> str:
        return "a whole model" if self.ranks == 1 else f"rank {self.rank} of {self.ranks}"


WHOLE = ModelPart()


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Where everything lies in a file for one model or part. `unit_bytes` are the bytes of units in memory."""

    identity: Identity
    unit_bytes: Mapping[Kind, int]
    slab_bytes: int
    slabs: int
    part: ModelPart = WHOLE

    @classmethod
    def of(
        cls, identity: Identity, unit_bytes: Mapping[Kind, int], size_bytes: int, part: ModelPart = WHOLE
    ) -> DiskLayout:
        """Return the layout of a file of up to `size_bytes`."""
        kept = {kind: unit_bytes[kind] for kind in KINDS if kind in unit_bytes}
        padded = {kind: _blocks(size) for kind, size in kept.items()}
        slab_bytes = choose_slab_bytes(padded, size_bytes)
        # Headers take at most this share of a slab.
        with_headers = slab_bytes + -(-slab_bytes // min(padded.values())) * ENTRY
        slabs = max(0, (size_bytes - 2 * BLOCK) // with_headers)
        return cls(identity, kept, slab_bytes, slabs, part)

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
        sizes, name = [self.unit_bytes.get(kind, 0) for kind in KINDS], self.identity.fingerprint
        body = _SUPER.pack(SUPER_MAGIC, VERSION, ENTRY, name, self.slab_bytes, self.slabs, *sizes)
        body += _SUM.pack(checksum(body))
        body += _PART.pack(self.part.rank, self.part.ranks) + encode_identity(self.identity)
        body += _SUM.pack(checksum(body))
        return body.ljust(BLOCK, b"\0")

    def doomed_entry(self, kind: Kind, unit: int) -> bytes:
        """Return the header of a unit that is to be overwritten. It says nothing about whose it was."""
        size = self.unit_bytes[kind]
        nothing = (0, NO_PARENT, NO_PARENT, b"", size, 0)
        fields = _ENTRY.pack(DOOMED_MAGIC, VERSION, KINDS.index(kind), 0, unit, *nothing)
        padded = fields.ljust(ENTRY - _SUM.size, b"\0")
        return padded + _SUM.pack(checksum(padded))

    def rows(self, region: memoryview, offset: int) -> tuple[EntryRows, EntryRows, int]:
        """Return the entries in a part of the file that begins at `offset`; doomed ones; how many others are damaged.

        All entries at once, so only what can be compared without the checksum of a header: `decode` comes later.
        """
        found = np.frombuffer(region, ENTRY_TYPE)
        sizes = np.array([self.unit_bytes.get(kind, 0) for kind in KINDS], np.uint64)
        padded = np.array([_blocks(int(size)) for size in sizes], np.uint64)
        kind = np.minimum(found["kind"], len(KINDS) - 1)
        # A header stands for the unit that begins where its entry is. Indices beyond the file would overflow.
        limit, least = self.slabs * self.slab_bytes, min(self.padded.values())
        unit = np.minimum(found["unit"], np.uint64(limit))
        begin = unit * padded[kind]
        place = np.uint64(offset) + np.arange(len(found), dtype=np.uint64) * np.uint64(ENTRY)
        good = (found["version"] == VERSION) & (found["kind"] < len(KINDS))
        good &= (found["size"] == sizes[kind]) & (sizes[kind] > 0) & (begin + padded[kind] <= np.uint64(limit))
        good &= np.uint64(BLOCK) + begin // np.uint64(least) * np.uint64(ENTRY) == place
        whole, doomed = good & (found["magic"] == ENTRY_MAGIC), good & (found["magic"] == DOOMED_MAGIC)
        others = np.frombuffer(region, "<u8").reshape(-1, ENTRY // 8)[~(whole | doomed)]
        return found[whole], found[doomed], int(others.any(axis=1).sum())

    def places(self, rows: EntryRows) -> NDArray[np.uint64]:
        """Return where the units of entries begin, counted in units of the smallest kind."""
        padded = np.array([_blocks(self.unit_bytes.get(kind, 0)) for kind in KINDS], np.uint64)
        found: NDArray[np.uint64] = rows["unit"] * padded[rows["kind"]] // np.uint64(min(self.padded.values()))
        return found

    def header_at(self, entry: memoryview, offset: int) -> UnitHeader | None:
        """Return the header of the entry at this offset, or None if there is none or it is damaged."""
        header = decode(entry)
        if header is None or header.size != self.unit_bytes.get(header.kind):
            return None
        return header if self.entry_of(header.kind, header.unit) == offset else None


def read_layout(block: bytes | memoryview) -> DiskLayout | None:
    """Return the layout that a superblock describes, or None if it is none of this version."""
    found = _read_super(block, VERSION)
    first = _SUPER.size + _SUM.size
    end = first + _PART.size + _IDENTITY.size
    if found is None or _SUM.unpack_from(block, end)[0] != checksum(bytes(block[:end])):
        return None
    fingerprint, slab_bytes, slabs, sizes = found
    identity = decode_identity(block[first + _PART.size : end])
    if identity is None or identity.fingerprint != fingerprint:
        return None
    return DiskLayout(identity, sizes, slab_bytes, slabs, ModelPart(*_PART.unpack_from(block, first)))


def is_earlier(block: bytes | memoryview, layout: DiskLayout) -> bool:
    """Return whether a superblock is of the version before, for units and a part as in this layout.

    That version does not say by which code its units were computed, so they cannot be used.
    """
    found = _read_super(block, VERSION - 1)
    # A whole model had no part then.
    part = (0, 0) if layout.part == WHOLE else (layout.part.rank, layout.part.ranks)
    same_part = _PART.unpack_from(block, _SUPER.size + _SUM.size) == part
    return found is not None and found[3] == layout.unit_bytes and same_part


def _read_super(block: bytes | memoryview, version: int) -> tuple[bytes, int, int, dict[Kind, int]] | None:
    """Return the fingerprint, slab bytes, slabs and sizes of units, if a superblock is whole and of this version."""
    body = bytes(block[: _SUPER.size])
    if len(block) < BLOCK or _SUM.unpack_from(block, _SUPER.size)[0] != checksum(body):
        return None
    magic, found, entry, fingerprint, slab_bytes, slabs, *sizes = _SUPER.unpack(body)
    if magic != SUPER_MAGIC or found != version or entry != ENTRY:
        return None
    return fingerprint, slab_bytes, slabs, {kind: size for kind, size in zip(KINDS, sizes, strict=True) if size}


def encode_identity(identity: Identity) -> bytes:
    """Return an identity for the beginning of a file, `IDENTITY_BYTES` long."""
    digests = (identity.configuration, identity.weights, identity.layout)
    return _IDENTITY.pack(*digests, identity.exact, identity.revisions.encode())


def decode_identity(data: bytes | memoryview) -> Identity | None:
    """Return an identity, or None if it is damaged."""
    configuration, weights, layout, exact, revisions = _IDENTITY.unpack(data)
    try:
        return Identity(configuration, weights, layout, revisions.rstrip(b"\0").decode(), exact)
    except UnicodeDecodeError:
        return None


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
