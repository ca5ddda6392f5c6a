"""The memory that prompts hold on their way to or from files, and what a ledger needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.misses import Miss, Reason
from weft.memory.recent_keys import RecentKeys
from weft.memory.saved.carriages import KeptPath, LoosePath
from weft.memory.trie import Node

# Imported cells that are remembered, to explain later misses.
MOST_IMPORTED = 1 << 14
_LOSSES = (Reason.EVICTED, Reason.STATE_EVICTED)


class Carried:
    """`moving`: copies are under way, after whose landing more memory can be evicted. `give_up` ends all imports."""

    def __init__(self, cell: int) -> None:
        self._cell = cell
        self._paths: list[KeptPath | LoosePath] = []
        self._imported = RecentKeys(MOST_IMPORTED)
        self.moving = False
        self.give_up: Callable[[], None] = lambda: None

    def hold(self, path: KeptPath | LoosePath) -> None:
        self._paths.append(path)

    def release(self, path: KeptPath | LoosePath) -> None:
        self._paths.remove(path)
        path.release()

    def held(self) -> Iterator[tuple[Kind, int]]:
        """Yield the units that prompts own beside the cache, once for each ownership."""
        for each in self._paths:
            yield from each.held()

    def pins(self) -> list[Node]:
        return [each.node for each in self._paths if isinstance(each, KeptPath)]

    def count(self, kind: Kind) -> int:
        return sum(each is kind for each, _ in self.held()) if self._paths else 0

    def note_imported(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._imported.add(key)

    def explain(self, keys: Sequence[Key], miss: Miss) -> Miss:
        """Return a miss with its own reason if what is missing was imported, and evicted since."""
        if miss.reason not in _LOSSES or not self._imported:
            return miss
        lost = keys[miss.cached // self._cell : miss.reusable // self._cell]
        return replace(miss, reason=Reason.IMPORT_EVICTED) if any(key in self._imported for key in lost) else miss
