"""Usage of each key by day, kept in a file through restarts, so that an operator can bill it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.base.errors import OptionError
from weft.base.whole_files import write_parts
from weft.server.access.rates import Used

log = logging.getLogger("weft.server")

# Days that are kept, and the bound on a file that is read.
MOST_DAYS = 400
MAX_FILE_BYTES = 256 << 20
SAVE_SECONDS = 10.0
# The name of clients of a server without keys.
NO_KEY = ""
Number = Annotated[int, Meta(ge=0)]


class DayUsage(msgspec.Struct):
    """Requests of a key on one day, and the tokens of its prompts, of which some were cached, and of its answers."""

    requests: Number = 0
    prompt_tokens: Number = 0
    cached_tokens: Number = 0
    generated_tokens: Number = 0

    def add(self, used: Used) -> None:
        self.prompt_tokens += used.prompt
        self.cached_tokens += used.cached
        self.generated_tokens += used.generated


# Usage by day (YYYY-MM-DD, UTC), and then by the key's name.
Days = dict[str, dict[str, DayUsage]]


class UsageBook:
    """Everything that keys have used. `clock` gives the time of day in seconds. Without a path nothing is kept."""

    def __init__(self, path: str | None, clock: Callable[[], float]) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._clock = clock
        # Days as they are in the file, encoded, and those that have changed since.
        self._encoded: dict[str, bytes] = {}
        self._changed: set[str] = set()
        self.days: Days = {} if self._path is None else read_days(self._path)
        if self._path is not None:
            self._encoded = {day: msgspec.json.encode(found) for day, found in self.days.items()}

    def note(self, key: str | None, requests: int = 0, used: Used | None = None) -> None:
        """Count requests of a key, or what one of them used."""
        day = datetime.fromtimestamp(self._clock(), UTC).date().isoformat()
        if day not in self.days:
            self.days[day] = {}
            for old in sorted(self.days)[:-MOST_DAYS]:
                del self.days[old]
        found = self.days[day].setdefault(key or NO_KEY, DayUsage())
        found.requests += requests
        found.add(used or Used())
        if self._path is not None:
            self._changed.add(day)

    async def save(self) -> None:
        """Write the file if something has changed. Only days that have changed are encoded again."""
        if self._path is None or not self._changed:
            return
        changed, self._changed = self._changed, set()
        # Copied, because keys may come while a thread encodes them.
        days = {day: dict(self.days[day]) if day in changed else None for day in self.days}
        try:
            await asyncio.to_thread(self._write, self._path, days)
        except OSError as error:
            self._changed |= changed & self.days.keys()
            log.error("cannot write usage_file %s: %s", self._path, error.strerror)

    def _write(self, path: Path, days: dict[str, dict[str, DayUsage] | None]) -> None:
        """Write days, each as it was encoded before if it is None."""
        encoded = {
            day: self._encoded[day] if usage is None else msgspec.json.encode(usage) for day, usage in days.items()
        }
        parts = (
            b"%b%b:%b" % (b"," if place else b"{", msgspec.json.encode(day), encoded[day])
            for place, day in enumerate(encoded)
        )
        write_parts(path, chain(parts, (b"}",)))
        self._encoded = encoded

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write the file now and then, and at the end."""

        stop = asyncio.Event()

        async def saving() -> None:
            while not stop.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(SAVE_SECONDS):
                        await stop.wait()
                await self.save()

        task = asyncio.create_task(saving())
        try:
            yield
        finally:
            # Not cancelled, so that no thread still writes when the last save begins.
            stop.set()
            await asyncio.gather(task, return_exceptions=True)
            await self.save()


def read_days(path: Path) -> Days:
    """Return the usage in a file, which may be missing. A damaged one is not overwritten."""
    if not path.parent.is_dir():
        raise OptionError(f"usage_file {path} must be in a folder that exists")
    if not path.exists():
        return {}
    if path.stat().st_size > MAX_FILE_BYTES:
        raise OptionError(f"usage_file {path} must have at most {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Days)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OptionError(
            f"usage_file {path} is not a file of usage: {error}; move it away to begin a new one"
        ) from None
    return {day: found[day] for day in sorted(found)[-MOST_DAYS:]}
