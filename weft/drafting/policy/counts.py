"""Counts of drafts, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Drafts by drafter and position, rows that were not drafted by reason."""

    proposed: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    not_drafted: Counter[str] = field(default_factory=Counter)  # sequences, by reason

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the counts with plain names: "suffix 1" are the first drafts of the drafter."""
        named = {
            "proposed": {f"{name} {place}": count for (name, place), count in self.proposed.items()},
            "accepted": {f"{name} {place}": count for (name, place), count in self.accepted.items()},
        }
        return named | {"not_drafted": dict(self.not_drafted)}
