"""Vectors of strings out of an R package's data base (.rdb), without R: enough for plain texts, and no more."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

# How a vector of strings begins in R's serialised form, and each string of it.
STRING = 0x09
MISSING = 0xFFFFFFFF


def character_vectors(file: Path) -> Iterator[list[str]]:
    """Every object's strings, in their order."""
    for record in records(file.read_bytes()):
        strings = list(strings_of(record))
        if strings:
            yield strings


def records(data: bytes) -> Iterator[bytes]:
    """Objects lie one behind the other: their length, then what is compressed in one of three ways."""
    at = 0
    while at + 5 < len(data):
        body = data[at + 4 :]
        if body[:1] == b"2":
            unpack, start = bz2.BZ2Decompressor(), 1
        elif body[:1] == b"Z":
            unpack, start = lzma.LZMADecompressor(), 1
        else:
            unpack, start = zlib.decompressobj(), 0
        record = unpack.decompress(body[start:])
        yield record
        at += 4 + len(body) - len(unpack.unused_data)


def strings_of(record: bytes) -> Iterator[str]:
    at = 0
    while at + 8 <= len(record):
        if record[at + 3] == STRING and record[at : at + 1] == b"\0":
            length = int.from_bytes(record[at + 4 : at + 8], "big")
            if length != MISSING and at + 8 + length <= len(record):
                yield record[at + 8 : at + 8 + length].decode("utf-8", errors="replace")
                at += 8 + length
                continue
        at += 4
