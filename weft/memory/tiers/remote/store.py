"""A store outside of the machine: bytes by name. The one that servers use is S3-compatible.

Every call may fail, hang up to a timeout, or return bytes that are not those that were put: `remote_tier.py` checks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol, TypeVar

from weft.base.errors import InvalidOption

T = TypeVar("T")

CONNECT_SECONDS, REQUEST_SECONDS = 2.0, 10.0
# After this many failures in a row the store is left alone for a while, twice as long each time.
MOST_FAILURES = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 5.0, 120.0
# Names that one request drops; a limit of S3.
NAMES_PER_DROP = 1000


class StoreFailed(Exception):
    """The store did not answer, or refused."""


class ObjectMissing(StoreFailed):
    """The store has no object of this name."""


class RemoteStore(Protocol):
    """Objects by name. All methods may be called from several threads, and raise `StoreFailed`."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str, most_bytes: int) -> bytes | memoryview:
        """Return an object, or as much of a longer one; raises `ObjectMissing` if there is none."""
        ...

    def has(self, name: str) -> bool: ...

    def names(self, prefix: str) -> Iterator[Sequence[str]]:
        """Yield the names that begin with a prefix, which ends with a slash, in parts."""
        ...

    def drop(self, names: Sequence[str]) -> None: ...


class S3Objects:
    """A bucket of an S3-compatible store. Endpoint and credentials come from the client's environment variables."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise InvalidOption("remote", "needs the package obstore; install weft-serve[remote]") from error
        self._client: Any = obstore
        options: Any = {"timeout": timedelta(seconds=REQUEST_SECONDS)}
        options["connect_timeout"] = timedelta(seconds=CONNECT_SECONDS)
        # With options of its own, the client does not read this variable.
        options["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        retries: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_SECONDS)}
        try:
            self._store = S3Store.from_url(url, client_options=options, retry_config=retries)
        except Exception as error:
            raise InvalidOption("remote", f"{url} cannot be opened: {error}; see the AWS_* variables") from error

    def put(self, name: str, data: bytes) -> None:
        self._try(lambda: self._client.put(self._store, name, data, use_multipart=False))

    def get(self, name: str, most_bytes: int) -> memoryview:
        found = self._try(lambda: self._client.get_range(self._store, name, start=0, length=most_bytes))
        return memoryview(found)

    def has(self, name: str) -> bool:
        try:
            self._try(lambda: self._client.head(self._store, name))
        except ObjectMissing:
            return False
        return True

    def names(self, prefix: str) -> Iterator[Sequence[str]]:
        parts = iter(self._try(lambda: self._client.list(self._store, prefix, chunk_size=NAMES_PER_DROP)))
        while (part := self._try(lambda: next(parts, None))) is not None:
            yield [each["path"] for each in part]

    def drop(self, names: Sequence[str]) -> None:
        if names:
            self._try(lambda: self._client.delete(self._store, list(names)))

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError as error:
            raise ObjectMissing(first_line(error)) from error
        # The client raises classes of its own besides those of the system.
        except Exception as error:
            raise StoreFailed(first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, which may quote whole responses.

    >>> first_line(ValueError("refused\\nbody ..."))
    'refused'
    """
    return str(error).split("\n", 1)[0][:400]


class GuardedStore:
    """A store that is left alone for a while after failures in a row: calls then fail at once."""

    def __init__(self, store: RemoteStore, clock: Callable[[], float] = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._away_until = 0.0
        self.pauses = 0

    @property
    def away(self) -> bool:
        return self._clock() < self._away_until

    def put(self, name: str, data: bytes) -> None:
        self._guarded(lambda: self._store.put(name, data))

    def get(self, name: str, most_bytes: int) -> bytes | memoryview:
        return self._guarded(lambda: self._store.get(name, most_bytes))

    def has(self, name: str) -> bool:
        return self._guarded(lambda: self._store.has(name))

    def names(self, prefix: str) -> Iterator[Sequence[str]]:
        # Drops are tried even if the store is left alone: an operator waits for them.
        yield from self._store.names(prefix)

    def beginning(self, name: str, most_bytes: int) -> bytes | memoryview:
        """Return the beginning of an object that may have to be dropped."""
        return self._store.get(name, most_bytes)

    def drop(self, names: Sequence[str]) -> None:
        self._store.drop(names)

    def _guarded(self, call: Callable[[], T]) -> T:
        if self.away:
            raise StoreFailed("the store is left alone for a while, because it did not answer")
        try:
            found = call()
        except ObjectMissing:
            self._note(failed=False)
            raise
        except StoreFailed:
            self._note(failed=True)
            raise
        self._note(failed=False)
        return found

    def _note(self, failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            if self._failures == 0:
                self.pauses = 0
            elif self._failures % MOST_FAILURES == 0:
                pause = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self.pauses)
                self._away_until = self._clock() + pause
                self.pauses += 1
