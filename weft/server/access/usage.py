"""Usage of each key by day, kept in a file through restarts, so that an operator can bill it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.base.errors import OptionError
from weft.base.whole_files import write_whole
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
        self._changed = False
        self.days: Days = {} if self._path is None else read_days(self._path)

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
        self._changed = True

    async def save(self) -> None:
        """Write the file if something has changed."""
        if self._path is None or not self._changed:
            return
        self._changed = False
        data = msgspec.json.encode(self.days)
        try:
            await asyncio.to_thread(write_whole, self._path, data)
        except OSError as error:
            self._changed = True
            log.error("cannot write usage_file %s: %s", self._path, error.strerror)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write the file now and then, and at the end."""

        async def saving() -> None:
            while True:
                await asyncio.sleep(SAVE_SECONDS)
                await self.save()

        task = asyncio.create_task(saving())
        try:
            yield
        finally:
            task.cancel()
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
