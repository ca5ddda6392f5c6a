"""What a running sequence holds, and the memory granted to a step. Values of the ledger, opaque outside `memory/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.base.retain import Retain
from weft.memory.keys import Key
from weft.memory.misses import Miss
from weft.memory.trie import Node


@dataclass(frozen=True, slots=True)
class Capture:
    """A state that a step writes. `own`: the sequence itself continues from it; `keep`: others may resume from it."""

    position: int
    slot: int | None  # None: the model has no recurrent state, only window pages to keep
    own: bool
    keep: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """Memory for tokens [start, end) of a lease, as it was when the plan was made.

    `unverified_before` drafts of the sequence are in the flight before: the tokens lie up to as many positions earlier,
    and there are captures for all cases. `earlier_slot` is the checkpoint before the earliest start.
    """

    start: int
    end: int
    read_slot: int | None
    captures: tuple[Capture, ...] = ()
    unverified_before: int = 0
    earlier_slot: int | None = None

    def checkpoint_at(self, position: int) -> int | None:
        """Return the slot that the sequence reads if it continues at a position within the grant."""
        reached = [capture.slot for capture in self.captures if capture.own and capture.position <= position]
        return reached[-1] if reached else self.read_slot

    def part(self, start: int, end: int) -> Grant:
        """Return the part of a grant for its tokens [start, end)."""
        captures = tuple(capture for capture in self.captures if start < capture.position <= end)
        return replace(self, start=start, end=end, read_slot=self.checkpoint_at(start), captures=captures)


class Lease:
    """Everything that one running sequence holds.

    cells:  [0, published) belong to the trie, pinned by `node`   [published, cells) are private
    slot:   the checkpoint at the grid position at or before the planned length; None in the first cell
    window: pages of cells [window_first, cells)
    """

    __slots__ = (
        "asked",
        "boundaries",
        "cells",
        "decided",
        "end_counts",
        "hidden",
        "junction",
        "keys",
        "miss",
        "node",
        "pending",
        "prompt",
        "published",
        "recalled",
        "retain",
        "returns",
        "seat",
        "shared",
        "shares_answer",
        "slot",
        "tail",
        "tenant",
        "window_first",
    )

    def __init__(
        self,
        seat: int,
        keys: list[Key],
        prompt: int,
        asked: set[int],
        miss: Miss,
        boundaries: frozenset[int] = frozenset(),
    ) -> None:
        self.seat = seat
        self.keys = keys
        # Returns the digest of the tenant; None if the cache does not know tenants.
        self.tenant: Callable[[], bytes] | None = None
        self.prompt = prompt
        self.asked = asked
        self.boundaries = boundaries
        self.miss = miss
        self.junction = miss.kv_matched if miss.kv_matched > miss.cached else 0
        self.recalled = 0  # up to here its cells were computed before and evicted since
        self.end_counts = True  # the end of its prompt is worth a snapshot, not only a candidate
        self.hidden = False  # its prefix is being dropped: nothing of it is published or kept
        self.shares_answer = True  # cells of its answer are for other sequences
        self.returns = False  # it closes because of a preemption
        self.retain: Sequence[Retain] = ()  # what to retain when it ends
        self.node: Node | None = None
        self.shared = 0
        self.published = 0
        self.cells = 0
        self.decided = 0  # up to here the snapshots for others are decided
        self.window_first = 0
        self.slot: int | None = None
        self.tail: int | None = None
        self.pending: list[Grant] = []

    @property
    def retains_end(self) -> bool:
        """Whether the sequence is retained with its answer."""
        return any(each.seconds and each.tokens is None for each in self.retain)
