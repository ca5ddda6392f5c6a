"""Drops prefixes from all tiers beside the steps: hidden at once, answered when the last byte is overwritten.

A drop that was accepted hides what it names (`removal.py`). Then it goes through the tiers, from the device down. In
each, copies under way are given up, because they could bring back what is dropped. When they have landed, the cells are
dropped, a bounded part in each step. Last, the file's units are overwritten in bounded parts (`erasing.py`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weft.base.companions import Companion
from weft.base.copies import Direction
from weft.base.tenants import Dropped
from weft.memory.cache import Cache
from weft.memory.ledger import Ledger
from weft.memory.removal import LOOKS_PER_DROP, CacheRemoval

if TYPE_CHECKING:
    from weft.memory.tiers.disk.restoring import Restoring, RowsToDrop

log = logging.getLogger("weft")

# Cells that a drop looks at in one step: about two milliseconds.
LOOKS_PER_STEP = 2048
# Cells of a file that are entered in one step for a drop that needs the whole index.
ENTERED_PER_STEP = LOOKS_PER_STEP // LOOKS_PER_DROP
FILE_FAILED = (
    "writing to the file failed, so units of this drop may be left in it; the next drop and the end of this server try "
    "again. If they fail too, or the server is killed, the next one may serve these units: repeat the drop there"
)


# Numbers of flights that were launched before a moment, by link and direction.
FlightMarks = dict[tuple[int, Direction], int]


class CopiesUnderWay(Protocol):
    """The copies between tiers, as far as a drop waits for them."""

    def land(self, wait: bool) -> None: ...
    def marks(self) -> FlightMarks: ...
    def has_passed(self, marks: FlightMarks) -> bool: ...


@dataclass(slots=True)
class PendingDrop:
    """`marks` are the copies that were under way when the drop came to the tier where it is now, until they landed."""

    number: int
    named: Dropped
    tier: int = 0
    marks: FlightMarks | None = None
    # Rows of the tier's file whose units are not entered.
    rows: RowsToDrop | None = None
    removal: CacheRemoval | None = None
    # The part of it that runs in a remote store.
    stored: Future[None] | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    left_tokens: int = 0

    def answer(self) -> dict[str, Any]:
        return {"dropped_tokens": dict(self.dropped), "left_tokens": self.left_tokens}

    def result(self, file_failed: bool) -> dict[str, Any]:
        """Return whether everything is gone from what outlives the process, and if not, why."""
        error = None if self.stored is None else self.stored.exception()
        reasons = [FILE_FAILED] if file_failed else []
        reasons += [] if error is None else [f"objects could not be dropped from the remote store: {error}"]
        for reason in reasons:
            log.warning("a drop is not complete: %s", reason)
        return {"erased": False, "reason": "; ".join(reasons)} if reasons else {"erased": True}


class Dropping(Companion):
    """`flush_drafts` drops all texts and states that drafts come from."""

    def __init__(self, ledger: Ledger, copies: CopiesUnderWay | None, flush_drafts: Callable[[], None]) -> None:
        self._ledger = ledger
        self._copies = copies
        self._flush_drafts = flush_drafts
        # Only the first one is under way.
        self._waiting: deque[PendingDrop] = deque()
        self._erasing: list[PendingDrop] = []
        self._answers: dict[int, dict[str, Any]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._erasing)

    def take_answers(self) -> dict[int, dict[str, Any]]:
        """Return the answers of drops that are complete, by their numbers."""
        answers, self._answers = self._answers, {}
        return answers

    def begin(self, number: int, tenant: bytes | None, prefix: bytes | None) -> None:
        """Accept a drop: from here on, no request reuses what it names."""
        drop = PendingDrop(number, Dropped(tenant, prefix))
        self._flush_drafts()
        self._ledger.hide(drop.named)
        if self._ledger.tiers is not None and self._ledger.tiers.arrivals is not None:
            self._ledger.tiers.arrivals.drop_incoming()
        self._waiting.append(drop)
        if self._ledger.tiers is not None:
            self._ledger.tiers.set_dropping(True)
        if len(self._waiting) == 1:
            self._come_to_tier(drop)

    def land(self) -> None:
        """Do the next part of the drops. Copies have landed before."""
        if not self.busy:
            return
        if self._waiting and self._go_on(self._waiting[0]):
            drop = self._waiting.popleft()
            self._ledger.hidden.remove(drop.named)
            # What requests have left there since the drop was accepted.
            self._flush_drafts()
            self._begin_erasing(drop)
            if self._waiting:
                self._come_to_tier(self._waiting[0])
            elif self._ledger.tiers is not None:
                self._ledger.tiers.set_dropping(False)
        tiers = self._ledger.tiers
        for drop in list(self._erasing):
            if tiers is None:
                self._answers[drop.number] = drop.answer()
            elif not tiers.erasing and (drop.stored is None or drop.stored.done()):
                self._answers[drop.number] = drop.answer() | drop.result(tiers.erasing_failed)
            else:
                continue
            self._erasing.remove(drop)
        if tiers is not None and not self.busy:
            tiers.ask_again()

    def close(self) -> None:
        """Take the cells of all drops out of the tiers, before a closing engine saves what is left."""
        while self._waiting:
            if self._copies is not None:
                self._copies.land(wait=True)
            self.land()

    def _come_to_tier(self, drop: PendingDrop) -> None:
        tiers = self._ledger.tiers
        if self._copies is not None and tiers is not None:
            # A copy that lands later would bring back what is dropped here.
            tiers.abandon()
            drop.marks = self._copies.marks()

    def _go_on(self, drop: PendingDrop) -> bool:
        """Do a bounded part of a drop; return whether its cells are gone from all tiers."""
        if drop.marks is not None and self._copies is not None and not self._copies.has_passed(drop.marks):
            return False
        drop.marks = None
        caches, tiers = self._ledger.caches, self._ledger.tiers
        with nullcontext() if tiers is None else tiers.erasing_freed():
            if not self._drop_some(drop, caches[drop.tier]):
                return False
        drop.tier += 1
        if drop.tier == len(caches):
            return True
        self._come_to_tier(drop)
        return False

    def _drop_some(self, drop: PendingDrop, cache: Cache) -> bool:
        """Drop a bounded part of a tier; return whether that was the last."""
        cell, name = self._ledger.cell, self._ledger.tier_names[drop.tier]
        tiers, named = self._ledger.tiers, drop.named
        restoring = tiers.links[drop.tier - 1].restoring if tiers is not None and drop.tier else None
        if drop.removal is None and restoring is not None and not self._drop_unentered(drop, restoring, name):
            return False
        drop.rows = None
        if drop.removal is None:
            drop.removal = CacheRemoval(cache, self._ledger.tenancy.chooser(named.tenant, named.prefix))
        removal = drop.removal
        if not removal.advance(LOOKS_PER_STEP):
            return False
        removal.end()
        drop.removal = None
        drop.dropped[name] += removal.dropped * cell
        drop.left_tokens += removal.left * cell
        return True

    def _drop_unentered(self, drop: PendingDrop, restoring: Restoring, name: str) -> bool:
        """Drop units of a file that are not entered; return whether that is done.

        Below which cell a unit of the file lies is known when all are entered; of whose tenant, at once.
        """
        assert self._ledger.tiers is not None
        if drop.named.prefix is not None:
            self._ledger.tiers.restore_some(ENTERED_PER_STEP)
            return False
        drop.rows = drop.rows or restoring.rows_to_drop(drop.named.tenant)
        drop.dropped[name] += drop.rows.drop_some(LOOKS_PER_STEP // LOOKS_PER_DROP) * self._ledger.cell
        return drop.rows.ended

    def _begin_erasing(self, drop: PendingDrop) -> None:
        if self._ledger.tiers is not None:
            # After the copies under way, which may have put objects of it.
            drop.stored = self._ledger.tiers.drop_stored(drop.named.tenant, drop.named.prefix)
        self._erasing.append(drop)
