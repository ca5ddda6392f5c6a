"""Drops prefixes from all tiers beside the steps: out of the index at once, answered when the last byte is overwritten.

A drop has three parts. What can be dropped leaves the index at once, and copies under way are given up. When these have
landed, what they had pinned is dropped too. Then the file's units are overwritten in bounded parts (`erasing.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from weft.engine.copying import Copier, FlightMarks
from weft.memory.ledger import Ledger

log = logging.getLogger("weft")

# Units of a file that are entered in one step for a drop that needs the whole index.
ENTERED_PER_STEP = 512
FILE_FAILED = (
    "writing to the file failed, so units of this drop may be left in it; the next drop and the end of this server try "
    "again. If they fail too, or the server is killed, the next one may serve these units: repeat the drop there"
)


@dataclass(slots=True)
class PendingDrop:
    """`marks` are the copies that were under way when it began; None until its first part is done."""

    number: int
    tenant: bytes | None
    prefix: bytes | None
    marks: FlightMarks | None = None
    # The part of it that runs in a remote store.
    stored: Future[None] | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    left_tokens: int = 0

    def note(self, found: dict[str, Any]) -> None:
        self.dropped.update(found["dropped_tokens"])
        self.left_tokens = found["left_tokens"]

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


class Dropping:
    def __init__(self, ledger: Ledger, copier: Copier | None) -> None:
        self._ledger = ledger
        self._copier = copier
        self._waiting: list[PendingDrop] = []
        self._landing: list[PendingDrop] = []
        self._erasing: list[PendingDrop] = []
        self._answers: dict[int, dict[str, Any]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._landing or self._erasing)

    def take_answers(self) -> dict[int, dict[str, Any]]:
        """Return the answers of drops that are complete, by their numbers."""
        answers, self._answers = self._answers, {}
        return answers

    def begin(self, number: int, tenant: bytes | None, prefix: bytes | None) -> None:
        drop = PendingDrop(number, tenant, prefix)
        if self._copier is None:
            drop.note(self._ledger.drop(tenant, prefix))
            self._answers[number] = drop.answer()
            return
        self._waiting.append(drop)
        self.advance()

    def advance(self) -> None:
        """Do the next part of all drops; call it in every step, when copies have landed."""
        if not self.busy:
            return
        assert self._copier is not None
        tiers = self._copier.tiers
        if any(drop.prefix is not None for drop in self._waiting):
            tiers.restore_some(ENTERED_PER_STEP)
        for drop in list(self._waiting):
            # Below which cell a unit of the file lies is known when all are entered; of whose tenant, at once.
            if drop.prefix is None or not tiers.restoring:
                self._waiting.remove(drop)
                self._drop_indexed(drop)
        for drop in list(self._landing):
            assert drop.marks is not None
            if self._copier.has_passed(drop.marks):
                self._landing.remove(drop)
                drop.note(self._ledger.drop(drop.tenant, drop.prefix))
                self._begin_erasing(drop)
        for drop in list(self._erasing):
            if not tiers.erasing and (drop.stored is None or drop.stored.done()):
                self._erasing.remove(drop)
                self._answers[drop.number] = drop.answer() | drop.result(tiers.erasing_failed)
        if not (self._landing or self._erasing):
            tiers.ask_again()

    def _drop_indexed(self, drop: PendingDrop) -> None:
        assert self._copier is not None
        # A copy that lands later would bring back what is dropped here.
        self._copier.tiers.abandon()
        drop.marks = self._copier.marks()
        drop.note(self._ledger.drop(drop.tenant, drop.prefix))
        if self._copier.has_passed(drop.marks):
            self._begin_erasing(drop)
        else:
            self._landing.append(drop)

    def _begin_erasing(self, drop: PendingDrop) -> None:
        assert self._copier is not None
        # After the copies under way, which may have put objects of it.
        drop.stored = self._copier.tiers.drop_stored(drop.tenant, drop.prefix)
        self._erasing.append(drop)
