"""Runs batches beside the server: one at a time for each key, all of them behind interactive traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from weft.base.errors import InvalidField
from weft.server.access.auth import Keys, Tenant
from weft.server.batches.job import BatchJob, Call
from weft.server.batches.journal import BatchAnswer, BatchJournal, BatchProgress, read_answers
from weft.server.batches.lines import InvalidBatch, LinePlace, Problem, places_of
from weft.server.batches.room import LineRoom
from weft.server.batches.store import OPEN, BatchStore, LineCounts, Shelf, StoredBatch, new_id
from weft.server.settings import Limits

log = logging.getLogger("weft.batches")


class BatchRunner:
    """`calls` are the routes by path, `width` the most sequences of lines at work at once.

    Half of the engine's sequences leave room for interactive requests, which also come first in the queue.
    """

    def __init__(self, store: BatchStore, keys: Keys, calls: dict[str, Call], limits: Limits, width: int) -> None:
        self.store = store
        self._keys = keys
        self._calls = calls
        self._limits = limits
        self._room = LineRoom(width, limits.open_sequences)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, BatchProgress] = {}
        self._cancelled: set[str] = set()
        self._closing = False
        # One at a time: a file is checked in a thread, and its beginnings are kept in memory meanwhile.
        self._checking = asyncio.Lock()
        # Files and batches are kept one after another, and none while a drop overwrites what was there.
        self.keeping = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Resume what a server before this one has left, and run batches until the end."""
        with self.store.claimed():
            # A server before this one may have been killed in the middle of a drop, or of writing.
            for work, what in ((self.store.overwrite_dropped, "overwrite dropped"), (self.store.sweep, "remove left")):
                try:
                    await asyncio.to_thread(work)
                except OSError as error:
                    log.error("cannot %s files of batches: %s", what, error)
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
        await asyncio.to_thread(shelf.check_room)
        try:
            places = await self._places(shelf, batch)
            batch.request_counts = LineCounts(total=len(places))
            batch.status, batch.in_progress_at = "in_progress", self.store.now()
        except InvalidBatch as error:
            batch.status, batch.failed_at = "failed", self.store.now()
            batch.errors = shown_errors(error)
        async with self.keeping:
            # Its file may have been dropped meanwhile, with all others of its tenant.
            shelf.file(batch.input_file_id)
            await asyncio.to_thread(shelf.save, batch)
        self.wake(tenant)
        return batch

    async def _places(self, shelf: Shelf, batch: StoredBatch) -> list[LinePlace]:
        """Return the lines of a batch's file. Raises `InvalidBatch`, also for a file that was deleted meanwhile."""
        path = shelf.path(batch.input_file_id, "data")
        try:
            async with self._checking:
                return await asyncio.to_thread(places_of, path, batch.endpoint, self._limits)
        except FileNotFoundError:
            raise InvalidBatch([Problem(1, f"file {batch.input_file_id} was deleted")]) from None

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

    async def drop(self, tenant: bytes | None) -> int:
        """Drop the files and batches of a tenant, by its digest, or of all; return how many, once they are overwritten.

        Lines at work are cancelled.
        """
        async with self.keeping:
            names, count = self.store.drop(tenant)
            tasks = [self._running[name] for name in names if name in self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.store.overwrite_dropped)
        return count

    def shown(self, batch: StoredBatch) -> StoredBatch:
        """Return a batch with its counts of this moment."""
        progress = self._progress.get(batch.id)
        return batch if progress is None else with_progress(batch, progress)

    # running ----------------------------------------------------------------------------------------------------------

    def wake(self, tenant: Tenant) -> None:
        """Run a tenant's open batches, if none is running and its key is still there."""
        name = self.store.shelf(tenant).folder.name
        if self._closing or name in self._running or not self._is_known(tenant):
            return
        task = asyncio.get_running_loop().create_task(self._run_all(tenant))
        self._running[name] = task
        task.add_done_callback(partial(self._ended, name, tenant))

    def _ended(self, name: str, tenant: Tenant, task: asyncio.Task[None]) -> None:
        del self._running[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("a batch has stopped; it continues with the next one or a restart", exc_info=task.exception())
        elif task.cancelled() or any(each.status in OPEN for each in self.store.shelf(tenant).batches()):
            # One of its batches was cancelled, or one came at the last moment; others may wait.
            self.wake(tenant)

    def _is_known(self, tenant: Tenant) -> bool:
        return tenant in self._keys.all_tenants

    async def _run_all(self, tenant: Tenant) -> None:
        shelf = self.store.shelf(tenant)
        while self._is_known(tenant):
            batch = next((each for each in shelf.batches() if each.status in OPEN), None)
            if batch is None:
                return
            await self._run(shelf, tenant, batch)

    async def _run(self, shelf: Shelf, tenant: Tenant, batch: StoredBatch) -> None:
        journal = BatchJournal(shelf.path(batch.id, "journal"))
        try:
            if batch.status == "in_progress" and not await self._answer(shelf, tenant, batch, journal):
                return
        except InvalidBatch as error:
            batch.errors = shown_errors(error)
        finally:
            self._progress.pop(batch.id, None)
            journal.close()
        await to_its_end(partial(self._finish, shelf, batch))

    async def _answer(self, shelf: Shelf, tenant: Tenant, batch: StoredBatch, journal: BatchJournal) -> bool:
        """Answer a batch's lines; return whether that is over, which it is not if the key was removed meanwhile."""
        places = await self._places(shelf, batch)
        # The output is as large as the journal, and both are there for a moment.
        most = journal.size + max(0, await asyncio.to_thread(lambda: shelf.free_bytes)) // 2
        source, allowed = shelf.path(batch.input_file_id, "data"), partial(self._is_known, tenant)
        # In a thread, because a journal of many answers takes long to read.
        job = await asyncio.to_thread(
            BatchJob, source, journal, places, tenant, self._calls, self._room, self._limits, most, allowed
        )
        self._progress[batch.id] = job.progress
        if batch.id in self._cancelled:
            return True
        await job.run()
        if job.full and not job.complete:
            done, total = job.progress.done, job.progress.total
            message = f"the answers to {done} of {total} lines fill all bytes of this key; delete files"
            raise InvalidBatch([Problem(1, message)])
        return job.complete

    def _finish(self, shelf: Shelf, batch: StoredBatch) -> None:
        """Turn the journal into the output. Repeating this after a crash gives the same files."""
        cancelled = batch.status == "cancelling" or batch.id in self._cancelled
        progress, journal = BatchProgress(batch.request_counts.total), shelf.path(batch.id, "journal")
        for answer in read_answers(journal):
            progress.add(answer)
        if batch.status == "in_progress":
            batch.status, batch.finalizing_at = "finalizing", self.store.now()
        # Chosen and saved before the files are written, so that a crash leaves none behind.
        batch.output_file_id = batch.output_file_id or (new_id("file-") if progress.completed else None)
        batch.error_file_id = batch.error_file_id or (new_id("file-") if progress.failed else None)
        shelf.save(batch)
        for name, kind in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            if name is not None:
                lines = (as_line(each) for each in read_answers(journal) if each.succeeded == (kind == "output"))
                shelf.add_output(lines, name, f"{batch.id}_{kind}.jsonl", self.store.now())
        batch = with_progress(batch, progress)
        batch.status = "cancelled" if cancelled else "failed" if batch.errors else "completed"
        shelf.save(msgspec.structs.replace(batch, **{f"{batch.status}_at": self.store.now()}))
        journal.unlink(missing_ok=True)
        self._cancelled.discard(batch.id)


async def to_its_end(work: Callable[[], None]) -> None:
    """Run work in a thread, and return when it has ended, even if the caller is cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise


def with_progress(batch: StoredBatch, progress: BatchProgress) -> StoredBatch:
    counts = LineCounts(total=progress.total, completed=progress.completed, failed=progress.failed)
    return msgspec.structs.replace(batch, request_counts=counts, usage=progress.usage())


def shown_errors(error: InvalidBatch) -> dict[str, Any]:
    problems = [{"code": "invalid_line", "message": each.message, "line": each.line} for each in error.problems]
    return {"object": "list", "data": problems}


def as_line(answer: BatchAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
