"""Reader of the header of a GGUF file: metadata, and the type, shape and place of every tensor.

A file is untrusted. Every length is checked against the bytes that are left before anything is read or allocated, so
the work is linear in the header, and nothing outside of the file is read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_KEYS, MOST_TENSORS = 1 << 14, 1 << 18
MOST_NAME_BYTES = 1 << 10
# Chat templates are the longest strings.
MOST_STRING_BYTES = 16 << 20
MOST_HEADER_BYTES = 512 << 20
# Of all lists: some times a vocabulary of four million tokens.
MOST_ENTRIES = 1 << 24
MOST_DIMENSIONS = 4
MOST_NUMBERS = 1 << 48
MOST_FILES = 1 << 10

# Formats of metadata values by their number in files; 8 is a string and 9 a list.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9

# Types of tensors by their number in files: name, numbers of a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is. `shape` has the outermost dimension first, as everywhere but in GGUF files."""

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # in the file
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a file, or of all files of a split one."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    bytes: int  # of the header: what identifies the file without its tensors


def is_gguf(path: Path) -> bool:
    """
    >>> [is_gguf(Path(name)) for name in ("a/b.gguf", "B.GGUF", "a.gguf.json")]
    [True, True, False]
    """
    return path.suffix.lower() == ".gguf"


def read_header(path: Path) -> Header:
    """Return the header of a file; of the first file of several, the tensors of all."""
    try:
        found = path.stat()
        return _read_all(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


@lru_cache(maxsize=2)
def _read_all(path: Path, changed: int, size: int) -> Header:
    """Return a header. Time and size are there so that another file of this name is read again."""
    first = read_one(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= MOST_FILES:
        raise ModelError(f"{path}: split.count must be at most {MOST_FILES}, got {count!r:.80}")
    if count <= 1:
        return first
    tensors = dict(first.tensors)
    for name in other_parts(path, count):
        part = read_one(path.with_name(name))
        for each in part.tensors.values():
            if each.name in tensors:
                raise ModelError(f"{part.path}: tensor {shown(each.name)} is in two files")
            tensors[each.name] = each
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"{path}: its {count} files have {len(tensors)} tensors, but should have {total!r:.80}")
    return Header(path, first.metadata, tensors, first.bytes)


def other_parts(path: Path, count: int) -> list[str]:
    """Return the names of the other files of a model that is split over several.

    >>> other_parts(Path("a-00001-of-00003.gguf"), 3)
    ['a-00002-of-00003.gguf', 'a-00003-of-00003.gguf']
    """
    ending = f"-{1:05}-of-{count:05}{path.suffix}"
    if not path.name.endswith(ending):
        raise ModelError(f"{path} is one of {count} files; pass the first one, whose name ends in {ending}")
    stem = path.name.removesuffix(ending)
    return [f"{stem}-{number:05}-of-{count:05}{path.suffix}" for number in range(2, count + 1)]


def read_one(path: Path) -> Header:
    """Return the header of one file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderReader(path, content).header()
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped.
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is empty'}") from error


def shown(text: str) -> str:
    """Return a string of a file for a message of one line."""
    return repr(text[:80])


class _HeaderReader:
    """A position in a file, and checked reads from there."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.place = 0
        self.entries = 0
        self.end = min(len(content), MOST_HEADER_BYTES)

    def fail(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is not a GGUF file that can be read: {why}")

    def take(self, count: int) -> int:
        """Advance by some bytes; return where they start."""
        if count > self.end - self.place:
            what = "the file ends" if self.end == len(self.content) else f"it is longer than {self.end} bytes"
            raise self.fail(f"{what} inside the header, at byte {self.place}")
        start = self.place
        self.place += count
        return start

    def scalar(self, code: str) -> Any:
        form = f"<{code}"
        return struct.unpack_from(form, self.content, self.take(struct.calcsize(form)))[0]

    def text(self, most: int = MOST_STRING_BYTES) -> str:
        size = self.scalar("Q")
        if size > most:
            raise self.fail(f"a string of {size} bytes at byte {self.place}, at most {most} are allowed")
        start = self.take(size)
        try:
            return self.content[start : start + size].decode()
        except UnicodeDecodeError:
            raise self.fail(f"the string at byte {start} is not UTF-8") from None

    def header(self) -> Header:
        if self.content[:4] != MAGIC:
            raise self.fail(f"it starts with {self.content[:4]!r}")
        self.take(4)
        version = self.scalar("I")
        if version not in VERSIONS:
            raise self.fail(f"its version is {version}, known are {', '.join(map(str, VERSIONS))} (little endian)")
        tensors, keys = self.scalar("Q"), self.scalar("Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            raise self.fail(f"{tensors} tensors and {keys} keys, at most {MOST_TENSORS} and {MOST_KEYS} are allowed")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text(MOST_NAME_BYTES)
            if key in metadata:
                raise self.fail(f"key {shown(key)} is there twice")
            metadata[key] = self.value()
        places = [self.tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment must be a power of two, got {alignment!r:.80}")
        return Header(self.path, metadata, self.placed(places, alignment), self.place)

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == STRING:
            return self.text()
        if kind != LIST:
            return self.scalar(self.known(kind))
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            return self.texts(count)
        code = self.known(kind)
        self.count_entries(count)
        start = self.take(struct.calcsize(f"<{code}") * count)
        numbers = struct.unpack_from(f"<{count}{code}", self.content, start)
        return list(numbers)

    def count_entries(self, count: int) -> None:
        """Refuse lists that would take much more memory than they take in the file."""
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise self.fail(f"its lists have more than {MOST_ENTRIES} entries")

    def known(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.fail(f"a value of unknown type {kind} at byte {self.place}")
        return SCALARS[kind]

    def texts(self, count: int) -> list[str]:
        """Return a list of strings. Each has a length of eight bytes at least, so `count` is bounded by the file."""
        self.count_entries(count)
        if count > (self.end - self.place) // 8:
            raise self.fail(f"a list of {count} strings at byte {self.place}, which is beyond its end")
        return [self.text(MOST_NAME_BYTES << 6) for _ in range(count)]

    def tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self.text(MOST_NAME_BYTES), self.scalar("I")
        if dimensions > MOST_DIMENSIONS:
            raise self.fail(f"tensor {shown(name)} has {dimensions} dimensions, at most {MOST_DIMENSIONS} are allowed")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return name, self.scalar("I"), shape[::-1], self.scalar("Q")

    def placed(self, infos: list[tuple[str, int, tuple[int, ...], int]], alignment: int) -> dict[str, StoredTensor]:
        """Return tensors by name, each inside of the file."""
        start = -(-self.place // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, number, shape, offset in infos:
            if name in found:
                raise self.fail(f"tensor {shown(name)} is there twice")
            if number not in TYPES:
                raise self.fail(f"tensor {shown(name)} has type {number}, which is not known")
            kind, per_block, block_bytes = TYPES[number]
            # Large products are not even computed.
            if any(not 0 < size <= MOST_NUMBERS for size in shape) or math.prod(shape) > MOST_NUMBERS:
                raise self.fail(f"tensor {shown(name)} has impossible shape {list(shape)}")
            if shape and shape[-1] % per_block:
                raise self.fail(f"tensor {shown(name)} of {kind} must have rows of whole blocks of {per_block}")
            size = math.prod(shape) // per_block * block_bytes
            if offset % alignment or start + offset + size > len(self.content):
                raise self.fail(f"tensor {shown(name)} is not at an aligned place inside the file; it may be truncated")
            found[name] = StoredTensor(self.path, name, kind, shape, start + offset, size)
        return found
