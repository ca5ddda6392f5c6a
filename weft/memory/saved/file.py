"""Writes and reads the prefix file of a prompt, unit by unit: pages from the root down, then each resume point.

The format is that of `tiers/disk/prefix_file.py`, with the tokens. A reader knows from them which unit must come next,
so no key of a file is believed. Nothing here touches the cache.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidOption, RequestError
from weft.base.grid import first_window_cell
from weft.memory.captures import Origin
from weft.memory.identity import Identity
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk.format import BLOCK, ENTRY, UnitHeader, checksum, decode
from weft.memory.tiers.disk.prefix_file import TOKEN_BYTES, PrefixHead, PrefixTokens, read_head

Tokens = NDArray[np.int32]
NAME = "the file"
DAMAGED = "the file is damaged, or has other units than its tokens ask for; nothing of it may be used"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """What a file must be of: a model, and its vocabulary."""

    identity: Identity
    vocab_size: int


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """What a unit must be: its kind, its cell's key and the one above, and where it ends."""

    kind: Kind
    key: Key
    parent: Key | None
    position: int


def page_places(spec: MemorySpec, keys: Sequence[Key]) -> list[UnitPlace]:
    """Return the pages of a path; none for a model without full attention."""
    if not spec.page_bytes:
        return []
    parents = [None, *keys]
    return [UnitPlace(Kind.PAGE, key, parents[i], (i + 1) * spec.cell) for i, key in enumerate(keys)]


def point_places(spec: MemorySpec, keys: Sequence[Key], position: int) -> list[UnitPlace]:
    """Return the units of the resume point at a position."""
    depth, key = position // spec.cell, keys[position // spec.cell - 1]
    found = [UnitPlace(Kind.STATE, key, None, position)] if spec.state_bytes else []
    first = first_window_cell(position, spec.window, spec.cell) if spec.window else depth
    return found + [UnitPlace(Kind.WINDOW, key, None, spec.cell * (each + 1)) for each in range(first, depth)]


class PrefixWriter:
    """Writes a new file that only this user can read. `close` completes it; `abandon` removes it."""

    def __init__(self, path: Path, identity: Identity, sizes: Mapping[Kind, int], tenant: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(path, flags, 0o600), "wb")
        except OSError as error:
            raise RequestError(f"{path} cannot be created: {error.strerror}; pass a new path") from None
        self._path = path
        self._head = (identity, sizes)
        self.tenant = tenant
        self._units = 0
        self._file.write(bytes(BLOCK))

    def add(self, place: UnitPlace, origin: Origin, payload: memoryview) -> None:
        header = UnitHeader(
            place.kind, self._units, place.position, place.key, place.parent, self.tenant, origin, len(payload),
            checksum(payload),
        )  # fmt: skip
        self._file.write(header.encode())
        self._file.write(payload)
        self._units += 1

    def close(self, tokens: Tokens, prompt: int) -> None:
        """Write the tokens, of which the first are the prompt's, and what the file says of itself."""
        raw = np.ascontiguousarray(tokens, "<i4").tobytes()
        self._file.write(raw)
        said = PrefixTokens(len(tokens), prompt, self.tenant, checksum(raw))
        self._file.seek(0)
        self._file.write(PrefixHead(*self._head, self._units, said).encode())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class PrefixReader:
    """Reads a file of this model, and of this tenant's digest. Raises `RequestError` in one line.

    `name` names this tenant's cells, by their tokens, of which there are `most_tokens` at most.
    """

    def __init__(
        self,
        path: Path,
        model: SavedModel,
        sizes: Mapping[Kind, int],
        spec: MemorySpec,
        tenant: bytes,
        name: PrefixIdentity,
        most_tokens: int,
    ) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RequestError(f"the file cannot be read: {error.strerror}") from None
        try:
            self._spec, self._sizes, self.tenant, self._most_tokens = spec, sizes, tenant, most_tokens
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            head = self._head(model.identity)
            assert head.tokens is not None
            self.prompt, self.units = head.tokens.prompt, head.units
            self.tokens = self._tokens(head.tokens, model.vocab_size)
            self.keys = name.keys(self.tokens, decoded_from=self.prompt)
            self._depth_of = {key: depth for depth, key in enumerate(self.keys, 1)}
            self._file.seek(BLOCK)
            self._left = head.units
        except OSError as error:
            self._file.close()
            raise RequestError(f"the file cannot be read: {error.strerror}") from None
        except BaseException:
            self._file.close()
            raise

    def _head(self, identity: Identity) -> PrefixHead:
        try:
            head = read_head(self._file, NAME)
        except (InvalidOption, struct.error) as error:
            raise RequestError(getattr(error, "complaint", DAMAGED)) from None
        if head.identity != identity or head.unit_bytes != self._sizes:
            why = head.identity.difference(identity) or "the sizes of units differ"
            raise RequestError(f"the file belongs to another model: {why}; save it with this one")
        said = head.tokens
        if said is None:
            raise RequestError("the file does not have its tokens; use one that GET /v1/prefixes or LLM.save has made")
        if said.tenant != self.tenant:
            raise RequestError("the file belongs to another tenant or salt; save it with the key that will use it", 403)
        if BLOCK + head.units * ENTRY + said.tokens * TOKEN_BYTES > self.size_bytes:
            raise RequestError(DAMAGED)
        return head

    def _tokens(self, said: PrefixTokens, vocab_size: int) -> Tokens:
        if said.tokens > self._most_tokens:
            raise RequestError(f"the file has {said.tokens} tokens; this engine takes up to {self._most_tokens}", 413)
        size = said.tokens * TOKEN_BYTES
        self._end = self.size_bytes - size
        self._file.seek(self._end)
        raw = self._file.read(size)
        if len(raw) != size or checksum(raw) != said.checksum:
            raise RequestError(DAMAGED)
        found = np.frombuffer(raw, "<i4").astype(np.int32)
        if not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
            raise RequestError(f"the file has tokens beyond the vocabulary, whose ids are 0 to {vocab_size - 1}")
        return found

    def places(self) -> Iterator[list[UnitPlace]]:
        """Yield what must come next: the pages, then the units of one resume point after the other."""
        yield page_places(self._spec, self.keys)
        last = 0
        while self._left:
            here = self._file.tell()
            header = decode(self._file.read(ENTRY))
            self._file.seek(here)
            # Not a position that the file says: the units that follow are those of this one, or refused.
            position = 0 if header is None else self._depth_of.get(header.key, 0) * self._spec.cell
            if not last < position <= len(self.keys) * self._spec.cell:
                raise RequestError(DAMAGED)
            last = position
            yield point_places(self._spec, self.keys, position)
        if self._file.tell() != self._end:
            raise RequestError(DAMAGED)

    def read(self, place: UnitPlace, into: memoryview) -> Origin:
        """Read the next unit, which must be this one; return why it was kept."""
        header = decode(self._file.read(ENTRY)) if self._left else None
        if header is None or header.size != len(into) or header.tenant != self.tenant:
            raise RequestError(DAMAGED)
        if (header.kind, header.key, header.parent, header.position) != (
            place.kind,
            place.key,
            place.parent,
            place.position,
        ):
            raise RequestError(DAMAGED)
        if self._file.tell() + header.size > self._end or self._file.readinto(into) != header.size:
            raise RequestError(DAMAGED)
        if checksum(into) != header.checksum:
            raise RequestError(DAMAGED)
        self._left -= 1
        return header.origin

    def close(self) -> None:
        self._file.close()
