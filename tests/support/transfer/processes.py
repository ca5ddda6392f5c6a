"""Transfers of engines in processes of their own."""

from __future__ import annotations

import asyncio

from weft.fleet.backend import FleetBackend

SECRET = b"s" * 32
# A machine that is full of other work may take this long to start an engine again.
RESTART_SECONDS = 1800


async def transfers_when_all_have_ended(fleet: FleetBackend) -> dict[str, int]:
    """The counters of transfers, once both engines have neither a request nor a transfer."""
    async with asyncio.timeout(RESTART_SECONDS):
        while True:
            stats = await fleet.stats()
            transfers = stats["transfers"]
            if not (stats["open"] or transfers["sending"] or transfers["receiving"]):
                return transfers
            await asyncio.sleep(0.01)
