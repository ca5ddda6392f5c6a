"""Runs batches beside the server: one at a time for each key, all of them behind interactive traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from weft.base.errors import InvalidField
from weft.server.access.auth import Keys, Tenant
from weft.server.batches.job import BatchJob, Call
from weft.server.batches.journal import BatchAnswer, BatchJournal, BatchProgress, read_answers
from weft.server.batches.lines import InvalidBatch, LinePlace, places_of
from weft.server.batches.store import OPEN, BatchStore, LineCounts, Shelf, StoredBatch, new_id
from weft.server.settings import Limits

log = logging.getLogger("weft.batches")


class BatchRunner:
    """`calls` are the routes by path, `width` the most lines at work at once.

    Half of the engine's sequences leave room for interactive requests, which also come first in the queue.
    """

    def __init__(self, store: BatchStore, keys: Keys, calls: dict[str, Call], limits: Limits, width: int) -> None:
        self.store = store
        self._keys = keys
        self._calls = calls
        self._limits = limits
        self._width = max(1, width)
        self._room = asyncio.Semaphore(self._width)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, BatchProgress] = {}
        self._cancelled: set[str] = set()
        self._closing = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Resume what a server before this one has left, and run batches until the end."""
        for tenant in self._keys.all_tenants:
            self.wake(tenant)
        try:
            yield
        finally:
            self._closing = True
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # what routes ask --------------------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, batch: StoredBatch) -> StoredBatch:
        """Check a batch's file and queue it. A file that is not a batch makes a batch that has failed."""
        shelf = self.store.shelf(tenant)
        file = shelf.file(batch.input_file_id)
        if file.purpose != "batch":
            raise InvalidField("input_file_id", f"must be a file with the purpose batch, got {file.purpose}")
        shelf.check_room()
        try:
            places = await asyncio.to_thread(places_of, shelf.path(file.id, "data"), batch.endpoint, self._limits)
            batch.request_counts = LineCounts(total=len(places))
            batch.status, batch.in_progress_at = "in_progress", self.store.now()
        except InvalidBatch as error:
            batch.status, batch.failed_at = "failed", self.store.now()
            problems = [{"code": "invalid_line", "message": each.message, "line": each.line} for each in error.problems]
            batch.errors = {"object": "list", "data": problems}
        shelf.save(batch)
        self.wake(tenant)
        return batch

    def cancel(self, tenant: Tenant, name: str) -> StoredBatch:
        """Cancel a batch; what it has answered so far becomes its output."""
        shelf = self.store.shelf(tenant)
        batch = shelf.batch(name)
        if batch.status == "in_progress":
            batch.status, batch.cancelling_at = "cancelling", self.store.now()
            shelf.save(batch)
            self._cancelled.add(name)
            if name in self._progress and (task := self._running.get(shelf.folder.name)) is not None:
                task.cancel()
            self.wake(tenant)
        return self.shown(batch)

    def shown(self, batch: StoredBatch) -> StoredBatch:
        """Return a batch with its counts of this moment."""
        progress = self._progress.get(batch.id)
        return batch if progress is None else with_progress(batch, progress)

    # running ----------------------------------------------------------------------------------------------------------

    def wake(self, tenant: Tenant) -> None:
        """Run a tenant's open batches, if none is running."""
        name = self.store.shelf(tenant).folder.name
        if self._closing or name in self._running:
            return
        task = asyncio.get_running_loop().create_task(self._run_all(tenant))
        self._running[name] = task
        task.add_done_callback(partial(self._ended, name, tenant))

    def _ended(self, name: str, tenant: Tenant, task: asyncio.Task[None]) -> None:
        del self._running[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("a batch has stopped; it continues with the next one or a restart", exc_info=task.exception())
        elif task.cancelled():
            # One of its batches was cancelled; others may wait.
            self.wake(tenant)

    async def _run_all(self, tenant: Tenant) -> None:
        shelf = self.store.shelf(tenant)
        while (batch := next((each for each in shelf.batches() if each.status in OPEN), None)) is not None:
            await self._run(shelf, tenant, batch)

    async def _run(self, shelf: Shelf, tenant: Tenant, batch: StoredBatch) -> None:
        journal = BatchJournal(shelf.path(batch.id, "journal"))
        try:
            if batch.status == "in_progress":
                source = shelf.path(batch.input_file_id, "data")
                places: Sequence[LinePlace] = await asyncio.to_thread(places_of, source, batch.endpoint, self._limits)
                job = BatchJob(source, journal, [*places], tenant, self._calls, self._room, self._width)
                self._progress[batch.id] = job.progress
                await job.run()
        finally:
            self._progress.pop(batch.id, None)
            journal.close()
        await asyncio.to_thread(self._finish, shelf, batch)

    def _finish(self, shelf: Shelf, batch: StoredBatch) -> None:
        """Turn the journal into the output. Repeating this after a crash gives the same files."""
        cancelled = batch.status == "cancelling" or batch.id in self._cancelled
        progress, good, bad = BatchProgress(batch.request_counts.total), list[bytes](), list[bytes]()
        for answer in read_answers(shelf.path(batch.id, "journal")):
            progress.add(answer)
            (good if answer.succeeded else bad).append(as_line(answer))
        if batch.status == "in_progress":
            batch.status, batch.finalizing_at = "finalizing", self.store.now()
        # Chosen and saved before the files are written, so that a crash leaves none behind.
        batch.output_file_id = batch.output_file_id or (new_id("file-") if good else None)
        batch.error_file_id = batch.error_file_id or (new_id("file-") if bad else None)
        shelf.save(batch)
        for name, lines, kind in ((batch.output_file_id, good, "output"), (batch.error_file_id, bad, "error")):
            if name is not None:
                shelf.add_output(b"".join(lines), name, f"{batch.id}_{kind}.jsonl", self.store.now())
        batch = with_progress(batch, progress)
        batch.status = "cancelled" if cancelled else "completed"
        ended = {"cancelled_at": self.store.now()} if cancelled else {"completed_at": self.store.now()}
        shelf.save(msgspec.structs.replace(batch, **ended))
        shelf.path(batch.id, "journal").unlink(missing_ok=True)
        self._cancelled.discard(batch.id)


def with_progress(batch: StoredBatch, progress: BatchProgress) -> StoredBatch:
    counts = LineCounts(total=progress.total, completed=progress.completed, failed=progress.failed)
    return msgspec.structs.replace(batch, request_counts=counts, usage=progress.usage())


def as_line(answer: BatchAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
