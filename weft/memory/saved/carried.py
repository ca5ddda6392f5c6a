"""The memory that prompts hold on their way to or from files: what the engine's part in them may do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import RequestError
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.kinds import Kind
from weft.memory.lease import Lease
from weft.memory.misses import Miss, Reason
from weft.memory.recent_keys import RecentKeys
from weft.memory.saved.carriages import Area, IncomingFile, KeptPath, LoosePath, kept_sizes
from weft.memory.saved.file import PrefixReader, PrefixWriter, SavedModel
from weft.memory.spec import MemorySpec
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.tiers import Tiers
from weft.memory.tiers.units import PointUnits
from weft.memory.trie import Node

# Imported cells that are remembered, to explain later misses.
MOST_IMPORTED = 1 << 14
# Of memory, for one file.
MOST_SHARE = 0.5
DROPPED = "it is being dropped"
_LOSSES = (Reason.EVICTED, Reason.STATE_EVICTED)


class CarryingMemory(Protocol):
    """What prompts on their way need of a ledger."""

    spec: MemorySpec
    cell: int
    enabled: bool
    arena: Arena
    cache: Cache
    tenancy: Tenancy
    tiers: Tiers | None
    page_table: NDArray[np.int32]

    def hides(self, keys: Sequence[Key], tenant: Callable[[], bytes]) -> bool: ...

    def point_at(self, lease: Lease, position: int) -> PointUnits: ...


class Carried:
    """`moving`: copies are under way, after whose landing more memory can be evicted. `give_up` ends all imports."""

    def __init__(self, ledger: CarryingMemory) -> None:
        self._ledger = ledger
        self._paths: list[KeptPath | LoosePath] = []
        self._imported = RecentKeys(MOST_IMPORTED)
        self.moving = False
        self.give_up: Callable[[], None] = lambda: None

    @cached_property
    def area(self) -> Area:
        return Area(self._ledger.spec)

    @property
    def waits_for_steps(self) -> bool:
        """Whether a unit that was just freed may still be written by a step in flight."""
        return self._ledger.arena.remembers_freed

    # paths ----------------------------------------------------------------------------------------------------------

    def open_file(self, path: Path, model: SavedModel, name: PrefixIdentity, tenant: bytes) -> IncomingFile:
        """Return a file on its way in, for a tenant whose cells have this name. Raises if it is not for it."""
        ledger = self._ledger
        if not ledger.enabled:
            raise RequestError("the prefix cache is off, so nothing can be imported")
        most_tokens = (ledger.page_table.shape[1] - 1) * ledger.cell
        sizes = kept_sizes(ledger.spec)
        reader = PrefixReader(path, model, sizes, ledger.spec, tenant, name, most_tokens)
        most = int(MOST_SHARE * ledger.arena.slabs * ledger.arena.slab_bytes)
        error = None
        if reader.size_bytes > most:
            error = RequestError(f"the file has {reader.size_bytes} bytes; this engine imports up to {most}", 413)
        elif ledger.hides(reader.keys, lambda: tenant):
            error = RequestError(f"the file was refused: {DROPPED}", 409)
        if error is not None:
            reader.close()
            raise error
        found = IncomingFile(self.area, ledger.cache, reader)
        self._paths.append(found.loose)
        return found

    def keep(self, lease: Lease, inner: bool) -> KeptPath:
        """Keep what a sequence has just computed of a prompt, its lease still open; with `inner` points above, too."""
        ledger, node = self._ledger, lease.node
        if lease.hidden or node is None:
            raise RequestError(f"the prompt cannot be saved: {DROPPED if lease.hidden else 'nothing of it is cached'}")
        end = node.depth * ledger.cell
        point = ledger.point_at(lease, end) if ledger.cache.point_bytes else None
        kept = KeptPath(ledger.cache, node, point, inner)
        self._paths.append(kept)
        return kept

    def new_file(self, path: Path, model: SavedModel, lease: Lease) -> PrefixWriter:
        """Return a new file for what a sequence has computed."""
        tenant = b"" if lease.tenant is None else lease.tenant()
        return PrefixWriter(path, model.identity, kept_sizes(self._ledger.spec), tenant)

    def begin_at(self, loose: LoosePath, keys: Sequence[Key], tenant: bytes) -> None:
        """Let a sequence whose cells have these keys start where they end, from the units of a file."""
        position = len(keys) * self._ledger.cell
        self._ledger.tenancy.note(keys[0], lambda: tenant)
        loose.publish(keys, [position] if position in loose.points else [])

    def publish(self, loose: LoosePath, keys: Sequence[Key], tenant: bytes) -> int:
        """Publish a file that was read; return how many tokens can be resumed from."""
        ledger, points = self._ledger, list(loose.points)
        ledger.tenancy.note(keys[0], lambda: tenant)
        loose.publish(keys, points)
        for key in keys:
            self._imported.add(key)
        ends = points or [len(keys) * ledger.cell]
        if ledger.tiers is not None:
            for end in ends:
                ledger.tiers.kept(keys[end // ledger.cell - 1])
        return max(ends)

    def release(self, path: KeptPath | LoosePath) -> None:
        self._paths.remove(path)
        path.release()

    def forget(self, kept: KeptPath) -> None:
        """Release a path that was only computed to be compared, and drop it."""
        self.release(kept)
        self._ledger.cache.drop_end(kept.node, 1)

    # what the ledger asks -------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[Kind, int]]:
        """Yield the units that prompts own beside the cache, once for each ownership."""
        for each in self._paths:
            yield from each.held()

    def pins(self) -> list[Node]:
        return [each.node for each in self._paths if isinstance(each, KeptPath)]

    def count(self, kind: Kind) -> int:
        return sum(each.count(kind) for each in self._paths)

    def explain(self, keys: Sequence[Key], miss: Miss) -> Miss:
        """Return a miss with its own reason if what is missing was imported, and evicted since."""
        if miss.reason not in _LOSSES or not self._imported:
            return miss
        cell = self._ledger.cell
        lost = keys[miss.cached // cell : miss.reusable // cell]
        return replace(miss, reason=Reason.IMPORT_EVICTED) if any(key in self._imported for key in lost) else miss
