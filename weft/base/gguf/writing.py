"""Writer of GGUF files: a header with metadata and places, then tensors one by one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.gguf.header import ALIGNMENT, LIST, MAGIC, STRING, TYPES, VERSIONS

NUMBER_OF = {name: number for number, (name, _, _) in TYPES.items()}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written. `content` returns its bytes when they are needed."""

    name: str
    type: str
    shape: tuple[int, ...]  # the outermost dimension first
    content: Callable[[], memoryview]

    @property
    def bytes(self) -> int:
        _, per_block, block_bytes = TYPES[NUMBER_OF[self.type]]
        count = 1
        for size in self.shape:
            count *= size
        return count // per_block * block_bytes


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    written: Callable[[int], object] | None = None,
) -> None:
    """Write a file; `written` is called with the bytes of each tensor."""
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += text(key) + entry(value)
    place = 0
    for each in tensors:
        head += text(each.name) + struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *reversed(each.shape))
        head += struct.pack("<IQ", NUMBER_OF[each.type], place)
        place += aligned(each.bytes)
    with path.open("wb") as file:
        file.write(head + bytes(aligned(len(head)) - len(head)))
        for each in tensors:
            content = each.content()
            assert content.nbytes == each.bytes, each.name
            file.write(content)
            file.write(bytes(aligned(each.bytes) - each.bytes))
            if written is not None:
                written(each.bytes)


def aligned(size: int) -> int:
    """
    >>> aligned(32), aligned(33)
    (32, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(value: Any) -> bytes:
    """Return a value with its type. Other readers want counts without a sign, and types of tokens with one.

    >>> entry(3), entry(True)
    (b'\\x04\\x00\\x00\\x00\\x03\\x00\\x00\\x00', b'\\x07\\x00\\x00\\x00\\x01')
    """
    if isinstance(value, (list, tuple)):
        kind, code = kind_of(value[0], in_list=True) if value else (4, "I")
        start = struct.pack("<IIQ", LIST, kind, len(value))
        if kind == STRING:
            return start + b"".join(map(text, value))
        return start + struct.pack(f"<{len(value)}{code}", *value)
    kind, code = kind_of(value)
    return struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack(f"<{code}", value))


def kind_of(value: Any, in_list: bool = False) -> tuple[int, str]:
    """Return the number of a value's type, and its format."""
    if isinstance(value, str):
        return STRING, ""
    if isinstance(value, bool):
        return 7, "?"
    if isinstance(value, float):
        return 6, "f"
    return (5, "i") if in_list or value < 0 else (4, "I")
