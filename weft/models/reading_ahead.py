"""Asks the system for the tensors that loading needs next, while another thread copies those before them.

A disk and a copy would wait for each other otherwise. Files are read as always, from memory by then, which the system
takes back when it needs it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

# Bytes that are asked for before they are needed, and at a time.
AHEAD_BYTES, PIECE_BYTES = 512 << 20, 8 << 20


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Where in a file a tensor lies."""

    file: Path
    start: int
    size: int


def places_in(file: Path) -> dict[str, FilePiece]:
    """Return where all tensors of a file of safetensors lie, whose header was checked."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    ends = {name: each["data_offsets"] for name, each in header.items()}
    return {name: FilePiece(file, 8 + length + start, end - start) for name, (start, end) in ends.items()}


class ReadAhead:
    """The order in which tensors will be needed, and how far loading has come."""

    def __init__(self, order: Iterable[tuple[str, FilePiece]]) -> None:
        unique = dict(order)
        self.places = list(unique.values())
        before = accumulate((place.size for place in self.places), initial=0)
        self.before = dict(zip(unique, before))
        self.changed = threading.Condition()
        self.needed = 0
        self.ended = False

    def reached(self, name: str) -> None:
        """Say that a tensor is needed now."""
        if self.before.get(name, 0) > self.needed:
            with self.changed:
                self.needed = self.before[name]
                self.changed.notify()

    def pieces(self) -> Iterator[FilePiece]:
        """Yield one piece after another when it is to be asked for, until the end."""
        done = 0
        for place in self.places:
            for first in range(0, place.size, PIECE_BYTES):
                size = min(PIECE_BYTES, place.size - first)
                done += size
                with self.changed:
                    self.changed.wait_for(lambda done=done: self.ended or done <= self.needed + AHEAD_BYTES)  # type: ignore[misc]
                    if self.ended:
                        return
                yield FilePiece(place.file, place.start + first, size)

    def run(self) -> None:
        opened: dict[Path, int] = {}
        # Without it, the files are read when they are needed.
        with suppress(OSError):
            try:
                for piece in self.pieces():
                    if piece.file not in opened:
                        opened[piece.file] = os.open(piece.file, os.O_RDONLY)
                    os.posix_fadvise(opened[piece.file], piece.start, piece.size, os.POSIX_FADV_WILLNEED)
            finally:
                for each in opened.values():
                    os.close(each)

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify()


@contextmanager
def reading_ahead(order: Iterable[tuple[str, FilePiece]]) -> Iterator[ReadAhead]:
    """Read ahead in a thread of its own inside the context."""
    ahead = ReadAhead(order)
    thread = threading.Thread(target=ahead.run, name="weft-read-ahead", daemon=True)
    if hasattr(os, "posix_fadvise"):
        thread.start()
    try:
        yield ahead
    finally:
        ahead.end()
        if thread.ident is not None:
            thread.join()
