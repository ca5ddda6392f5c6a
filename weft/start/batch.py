"""Answers a JSONL file of requests without a server: the routes of one, with nothing listening.

The output is the journal of the batch: each answer is appended at once, and a later run continues where one has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from weft.server.access.auth import Tenant
from weft.server.app import calls_of
from weft.server.batches.job import BatchJob
from weft.server.batches.journal import BatchJournal, BatchProgress
from weft.server.batches.lines import places_of
from weft.server.batches.room import LineRoom
from weft.server.front import Front, pool_for
from weft.server.settings import ServerSettings
from weft.start.launch import Orders, Served, first_of, started

SHOWN_SECONDS = 1.0
Show = Callable[[BatchProgress], None]


def answer_file(served: Served, settings: ServerSettings, source: Path, target: Path, show: Show) -> BatchProgress:
    """Answer every line of `source` that `target` has no answer for; stop at the first signal."""
    return asyncio.run(_answer(served, settings, source, target, show))


async def _answer(served: Served, settings: ServerSettings, source: Path, target: Path, show: Show) -> BatchProgress:
    # A file that is not a batch is reported before a model is loaded.
    places = places_of(source, None, settings.limits)
    orders, backend = Orders(), served.backend()
    if not await started(backend, orders):
        return BatchProgress(len(places))
    journal = BatchJournal(target)
    try:
        texts = served.texts(backend.info)
        pool = pool_for(texts.tokenizer, texts.template, settings)
        front = Front(backend, texts.tokenizer, texts.template, texts.end_tokens, settings, texts.suggested, pool)
        await pool.start()
        room = LineRoom(backend.info.max_sequences, settings.limits.open_sequences)
        job = BatchJob(source, journal, places, Tenant(), calls_of(front), room, settings.limits)
        show(job.progress)
        await _run(job, orders, show)
        show(job.progress)
        pool.stop()
        return job.progress
    finally:
        journal.close()
        await backend.stop(0)


async def _run(job: BatchJob, orders: Orders, show: Show) -> None:
    async def report() -> None:
        while True:
            await asyncio.sleep(SHOWN_SECONDS)
            show(job.progress)

    work, reporting = asyncio.create_task(job.run()), asyncio.create_task(report())
    try:
        await first_of(orders.stop, work)
        if not work.done():
            work.cancel()
        await asyncio.gather(work, return_exceptions=orders.stop.is_set())
    finally:
        reporting.cancel()
