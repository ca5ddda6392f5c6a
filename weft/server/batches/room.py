"""How many sequences lines of batches may have open at once, so that they leave room for interactive requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LineRoom:
    """Lines get their part of `sequences` in the order in which they ask. A line that opens more runs alone.

    `most_of_line` is what a single line may open.
    """

    def __init__(self, sequences: int, open_sequences: int) -> None:
        self.most_of_line = max(1, open_sequences // 2)
        self.sequences = max(1, min(sequences, self.most_of_line))
        self._free = self.sequences
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room for a number of sequences, and hold it."""
        count = min(sequences, self.sequences)
        await self._take(count)
        try:
            yield
        finally:
            self._give(count)

    async def _take(self, count: int) -> None:
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # It may have got its part at the same moment. If not, the next in the queue may fit.
            self._give(0 if turn.cancelled() else count)
            raise

    def _give(self, count: int) -> None:
        self._free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)
