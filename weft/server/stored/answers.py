"""The answers that a server keeps, per key: bounded in number, bytes and time, in memory and, if asked to, in a file.

Those of one key are invisible to all others. When there are too many, the key with the most bytes loses its oldest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile

import msgspec
import numpy as np

from weft.base.errors import RequestError
from weft.base.tenants import tenant_digest
from weft.server.access.auth import Tenant
from weft.server.stored.file import RecordFile
from weft.text.prompts import Tokens

log = logging.getLogger("weft.server")

# As OpenAI keeps responses.
MOST_SECONDS = 30 * 86400.0
MOST_ANSWERS = 1 << 16
# Of the file, against its memory: records fill whole blocks, and leave gaps.
FILE_SHARE = 2


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, and all that it takes to go on with it. `tokens` are its prompt, `answers` those of its choices.

    `earlier` and `items` are the conversation before, and what this request added to it: JSON lists of items, as is
    `output`. `body` is the response as JSON; empty for a fork. `until` is when it is forgotten, if not by its age.
    """

    id: str
    tenant: bytes
    created: float
    cache_salt: str | None
    tokens: bytes
    answers: list[bytes]
    earlier: bytes = b"[]"
    items: bytes = b"[]"
    output: bytes = b"[]"
    body: bytes = b""
    model: str = ""  # whose tokens they are; empty: kept by an earlier version
    until: float | None = None

    @property
    def prompt(self) -> Tokens:
        return as_tokens(self.tokens)


def as_tokens(data: bytes) -> Tokens:
    return np.frombuffer(data, "<i4").astype(np.int32)


def as_bytes(tokens: Tokens | list[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


class StoredAnswers:
    """`most_bytes` bound the answers as they are encoded; `now` is the time in seconds since the epoch."""

    def __init__(self, most_bytes: int, file: RecordFile | None = None, now: Callable[[], float] = time.time) -> None:
        self._most_bytes = most_bytes
        self._file = file
        self._now = now
        # By tenant: answers in the order of their arrival, with their sizes.
        self._kept: defaultdict[bytes, dict[str, tuple[StoredAnswer, int]]] = defaultdict(dict)
        self._bytes: Counter[bytes] = Counter()
        self._places: dict[str, int] = {}
        self._lock = threading.RLock()
        # One thread writes in order, so that no answer is written after it was removed.
        self._writer = ThreadPoolExecutor(1, "weft-responses")
        if file is not None:
            self._restore(file)

    def _restore(self, file: RecordFile) -> None:
        found = []
        for place, payload in file.records():
            answer = msgspec.msgpack.decode(payload, type=StoredAnswer)
            self._places[answer.id] = place
            found.append((answer, len(payload)))
        for answer, size in sorted(found, key=lambda each: each[0].created):
            self._insert(answer, size)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def held_bytes(self) -> int:
        return self._bytes.total()

    # one answer -----------------------------------------------------------------------------------------------------

    def add(self, answer: StoredAnswer) -> None:
        """Store an answer. Any thread may call this."""
        payload = msgspec.msgpack.encode(answer)
        if len(payload) > self._most_bytes:
            log.warning("an answer of %d bytes is not kept: --responses-memory is %d", len(payload), self._most_bytes)
            return
        with self._lock:
            self._insert(answer, len(payload))
            if self._file is not None:
                self._writer.submit(self._write, answer.id, payload)

    def _insert(self, answer: StoredAnswer, size: int) -> None:
        self._kept[answer.tenant][answer.id] = answer, size
        self._bytes[answer.tenant] += size
        self._expire(answer.tenant)
        while self.held_bytes > self._most_bytes or len(self) > MOST_ANSWERS:
            largest = max(self._bytes, key=lambda each: self._bytes[each])
            self._remove(largest, next(iter(self._kept[largest])))

    def _expire(self, tenant: bytes) -> None:
        oldest, kept = self._now() - MOST_SECONDS, self._kept.get(tenant, {})
        # They are in the order of their arrival, so the rest need not be looked at.
        for name, _ in list(takewhile(lambda each: each[1][0].created < oldest, kept.items())):
            self._remove(tenant, name)

    def find(self, name: str, tenant: Tenant, field: str = "id") -> StoredAnswer:
        """Return an answer of this tenant. Raises a 404: it does not say whether another tenant has it."""
        digest = tenant_digest(tenant.salt)
        with self._lock:
            self._expire(digest)
            found = self._kept.get(digest, {}).get(name)
            if found is not None and found[0].until is not None and found[0].until <= self._now():
                self._remove(digest, name)
                found = None
        if found is None:
            raise missing(name, field)
        return found[0]

    def knows(self, name: str, tenant: Tenant) -> bool:
        with self._lock:
            return name in self._kept.get(tenant_digest(tenant.salt), {})

    async def delete(self, name: str, tenant: Tenant) -> None:
        """Remove an answer, and return when it is overwritten in the file."""
        with self._lock:
            self.find(name, tenant)
            end = self._remove(tenant_digest(tenant.salt), name)
        await asyncio.wrap_future(end)

    async def drop(self, tenant: bytes | None) -> int:
        """Remove all answers of a tenant, by its digest, or of all; return how many, once they are overwritten."""
        with self._lock:
            chosen = [tenant] if tenant is not None else list(self._kept)
            names = [(each, name) for each in chosen for name in self._kept.get(each, ())]
            ends = [self._remove(each, name) for each, name in names]
        await asyncio.gather(*map(asyncio.wrap_future, ends))
        return len(ends)

    # the file -------------------------------------------------------------------------------------------------------

    def _remove(self, tenant: bytes, name: str) -> Future[None]:
        _, size = self._kept[tenant].pop(name)
        self._bytes[tenant] -= size
        if not self._kept[tenant]:
            del self._kept[tenant], self._bytes[tenant]
        return self._writer.submit(self._erase, name)

    def _write(self, name: str, payload: bytes) -> None:
        assert self._file is not None
        try:
            place = self._file.add(payload)
        except OSError as error:
            log.warning("an answer is kept in memory only: %s", error)
            return
        if place is None:
            log.warning("an answer is kept in memory only: the file of responses is full")
        else:
            self._places[name] = place

    def _erase(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is not None and self._file is not None:
            self._file.erase(place)

    def close(self) -> None:
        """Write what is left."""
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()


def missing(name: str, field: str) -> RequestError:
    return RequestError(
        f"{field}: there is no answer {name!r:.80}; it was not stored, or was removed", 404, field=field
    )
