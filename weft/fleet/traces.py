"""What the members of a fleet note of their requests, for those who watch the fleet: each batch names its member."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from weft.backends.backend import Hear
from weft.engine.tracing.events import TraceBatch
from weft.fleet.member import Member


class MemberTraces:
    """`members` is the fleet's own list; `joined` and `left` are called after changes of it."""

    def __init__(self, members: Sequence[Member], wall: Callable[[], float] = time.time) -> None:
        self._members = members
        self._wall = wall
        self._watchers: list[Hear] = []
        # Given to the members, by their names.
        self._hears: dict[str, Hear] = {}

    def watch(self, hear: Hear) -> None:
        if hear not in self._watchers:
            self._watchers.append(hear)
        for member in self._members:
            self.joined(member)

    def unwatch(self, hear: Hear) -> None:
        if hear in self._watchers:
            self._watchers.remove(hear)
        if not self._watchers:
            for member in self._members:
                self.left(member)

    def joined(self, member: Member) -> None:
        if self._watchers:
            hear = self._hears.setdefault(member.name, partial(self._hear, member.name))
            member.backend.watch(hear)

    def left(self, member: Member) -> None:
        if (hear := self._hears.pop(member.name, None)) is not None:
            member.backend.unwatch(hear)
            # Nothing more is heard of what ran there.
            self._hear(member.name, None)

    def close(self) -> None:
        """Tell everyone who watches that the fleet has ended."""
        for hear in list(self._watchers):
            hear(None)

    def _hear(self, name: str, batch: TraceBatch | None) -> None:
        found = TraceBatch(1000 * self._wall(), ended=True) if batch is None else batch
        for hear in list(self._watchers):
            hear(replace(found, source=name))
