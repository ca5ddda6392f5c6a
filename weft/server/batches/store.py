"""Files and batches on disk, in a folder for each key. Everything is bounded; names come from here, never from clients.

FOLDER/TENANT/file-ID.json, file-ID.data      a file and its facts
FOLDER/TENANT/batch_ID.json, batch_ID.journal  a batch and its answers so far
FOLDER/dropped-NUMBER                          what an operator dropped, until it is overwritten

TENANT is the tenant's digest, as `GET /cache` shows it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.base.errors import OptionError, RequestError
from weft.base.file_locks import lock
from weft.base.tenants import TENANT_BYTES, tenant_digest
from weft.base.whole_files import overwrite, sync_folder, write_parts, write_whole
from weft.server.access.auth import Tenant
from weft.server.settings import Limits

T = TypeVar("T", bound=msgspec.Struct)
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
# Names of a shelf's files; the last part is that of a file that is being written (`write_parts`).
LEFT = re.compile(rf"({FILE_ID.pattern}|{BATCH_ID.pattern})\.(json|data|journal)(\.[0-9a-f]+\.new)?")
TENANT = re.compile(f"[0-9a-f]{{{2 * TENANT_BYTES}}}")
DROPPED = "dropped-"
PURPOSES = ("batch", "batch_output")
OPEN = ("in_progress", "finalizing", "cancelling")


class StoredFile(msgspec.Struct, kw_only=True):
    """A file, in the shape of OpenAI's."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class LineCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch, in the shape of OpenAI's."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    status: str
    completion_window: str = "24h"
    object: str = "batch"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


class Shelf:
    """Files and batches of one tenant."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self._limits = limits

    def path(self, name: str, kind: str) -> Path:
        assert FILE_ID.fullmatch(name) or BATCH_ID.fullmatch(name)
        return self.folder / f"{name}.{kind}"

    # files ------------------------------------------------------------------------------------------------------------

    def add_file(self, data: bytes, filename: str, purpose: str, now: int) -> StoredFile:
        """Keep a client's file; refuse it beyond the tenant's bounds."""
        self._check_files(1)
        used = self.used_bytes()
        if used + len(data) > self._limits.batch_folder_bytes:
            most = self._limits.batch_folder_bytes
            raise RequestError(
                f"this key uses {used} of {most} bytes, so {len(data)} more do not fit; delete files", 413
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        return self._keep(
            (data,), StoredFile(id=new_id("file-"), bytes=0, created_at=now, filename=filename, purpose=purpose)
        )

    def add_output(self, lines: Iterable[bytes], name: str, filename: str, now: int) -> StoredFile:
        """Keep a result under a name that was chosen before, so that a repeated call changes nothing."""
        return self._keep(
            lines, StoredFile(id=name, bytes=0, created_at=now, filename=filename, purpose="batch_output")
        )

    def _keep(self, parts: Iterable[bytes], file: StoredFile) -> StoredFile:
        file.bytes = write_parts(self.path(file.id, "data"), parts)
        write_whole(self.path(file.id, "json"), msgspec.json.encode(file))
        return file

    def files(self) -> list[StoredFile]:
        return self._all("file-*.json", StoredFile)

    def file(self, name: str) -> StoredFile:
        return self._one(name, FILE_ID, StoredFile, "file")

    def delete_file(self, name: str) -> None:
        self.file(name)
        if any(each.input_file_id == name and each.status in OPEN for each in self.batches()):
            raise RequestError(f"file {name} belongs to a batch that is not complete; cancel the batch first", 409)
        self.path(name, "json").unlink(missing_ok=True)
        self.path(name, "data").unlink(missing_ok=True)

    def _check_files(self, more: int = 0) -> None:
        """Refuse another file, or what makes files of its own if there are too many even without `more` of them."""
        count = len(self.files())
        if count + more > self._limits.batch_files:
            raise RequestError(f"this key has {count} files, the limit; delete some with DELETE /v1/files/ID", 413)

    def used_bytes(self) -> int:
        return sum(map(_size, self.folder.glob("*")))

    @property
    def free_bytes(self) -> int:
        return self._limits.batch_folder_bytes - self.used_bytes()

    # batches ----------------------------------------------------------------------------------------------------------

    def save(self, batch: StoredBatch) -> None:
        write_whole(self.path(batch.id, "json"), msgspec.json.encode(batch))

    def batches(self) -> list[StoredBatch]:
        return self._all("batch_*.json", StoredBatch)

    def batch(self, name: str) -> StoredBatch:
        return self._one(name, BATCH_ID, StoredBatch, "batch")

    def check_room(self) -> None:
        """Refuse a further batch beyond the bounds; of batches, forget the oldest one that is complete if there is any.

        Its answers are files too, so there must be room for them.
        """
        self._check_files()
        if self.free_bytes <= 0:
            most = self._limits.batch_folder_bytes
            raise RequestError(f"this key uses all of its {most} bytes; delete some with DELETE /v1/files/ID", 413)
        known = sorted(self.batches(), key=lambda each: each.created_at)
        if len(known) < self._limits.batches:
            return
        ended = next((each for each in known if each.status not in OPEN), None)
        if ended is None:
            raise RequestError(f"this key has {len(known)} batches that are not complete, the limit; wait for one", 429)
        self.path(ended.id, "json").unlink(missing_ok=True)
        self.path(ended.id, "journal").unlink(missing_ok=True)

    # after a kill -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what a killed server has left: half-written files, contents without facts, journals of ended batches.

        No file may be written meanwhile.
        """
        is_open = {each.id for each in self.batches() if each.status in OPEN}
        for path in self.folder.iterdir():
            left = LEFT.fullmatch(path.name)
            if left is None:
                continue
            name, kind, unfinished = left.groups()
            has_owner = name in is_open if kind == "journal" else self.path(name, "json").exists()
            if unfinished or not has_owner:
                path.unlink()

    # reading ----------------------------------------------------------------------------------------------------------

    def _one(self, name: str, form: re.Pattern[str], kind: type[T], word: str) -> T:
        if form.fullmatch(name):
            try:
                return msgspec.json.decode(self.path(name, "json").read_bytes(), type=kind)
            except FileNotFoundError:
                pass
        raise RequestError(f"{word} {name!r:.60} does not exist", 404, code=f"{word}_not_found")

    def _all(self, pattern: str, kind: type[T]) -> list[T]:
        found = []
        for path in sorted(self.folder.glob(pattern)):
            # It may have been deleted meanwhile.
            with suppress(FileNotFoundError):
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        return sorted(found, key=lambda each: each.created_at)  # type: ignore[attr-defined]


class BatchStore:
    """The folder of all tenants. `clock` gives the time of day in seconds."""

    def __init__(self, folder: str, limits: Limits, clock: Callable[[], float]) -> None:
        self._folder = Path(folder).expanduser()
        self._limits = limits
        self._clock = clock
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"batch_folder {folder} cannot be created: {error.strerror}") from None
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise OptionError(f"batch_folder {folder} must be a folder that this user can write to")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other servers from running the batches of this folder, which would answer lines twice."""
        file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            lock(file, of_process=True)
        except BlockingIOError:
            os.close(file)
            raise OptionError(f"batch_folder {self._folder} is used by another server; pass another folder") from None
        except OSError as error:
            os.close(file)
            raise OptionError(f"batch_folder {self._folder} cannot be locked: {error.strerror}; leave it out") from None
        try:
            yield
        finally:
            os.close(file)

    def now(self) -> int:
        return int(self._clock())

    def shelf(self, tenant: Tenant) -> Shelf:
        return Shelf(self._folder / tenant_digest(tenant.salt).hex(), self._limits)

    def sweep(self) -> None:
        """Remove what a killed server has left, of all tenants, also of those whose key is gone."""
        for folder in self._folder.iterdir():
            if TENANT.fullmatch(folder.name):
                Shelf(folder, self._limits).sweep()

    # drops ------------------------------------------------------------------------------------------------------------

    def drop(self, tenant: bytes | None) -> tuple[list[str], int]:
        """Take the folder of a tenant, by its digest, or those of all out of use at once.

        Return their names, and how many files and batches they have. `overwrite_dropped` does the rest.
        """
        chosen = [each for each in self._folder.iterdir() if TENANT.fullmatch(each.name)]
        found = [each for each in chosen if tenant is None or each.name == tenant.hex()]
        count = sum(1 for folder in found for _ in folder.glob("*.json"))
        for folder in found:
            folder.rename(self._folder / (DROPPED + secrets.token_hex(8)))
        return [each.name for each in found], count

    def overwrite_dropped(self) -> None:
        """Overwrite everything that was dropped, and return when that is on the disk."""
        sync_folder(self._folder)
        for folder in self._folder.glob(DROPPED + "*"):
            for path in folder.iterdir():
                overwrite(path)
            folder.rmdir()
        sync_folder(self._folder)


def _size(path: Path) -> int:
    """Return a file's size; 0 if it has been deleted or renamed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
