"""Numbers that belong to the last keys: a bounded memory of what is gone."""

from __future__ import annotations

from weft.memory.keys import Key

_MASK = (1 << 60) - 1


class RecentKeys:
    """A number for each of the keys that were added last: of at least half of `most`, and of `most` at most.

    60 bits stand for a key, so that an entry takes about 100 bytes. Two keys with the same bits could only make a
    statistic wrong. When the newer half is full, the older one is forgotten at once.
    """

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def __contains__(self, key: Key) -> bool:
        number = short(key)
        return number in self._newer or number in self._older

    def add(self, key: Key, value: int = 0) -> None:
        number = short(key)
        self._older.pop(number, None)
        self._newer[number] = value
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, {}

    def get(self, key: Key) -> int | None:
        number = short(key)
        found = self._newer.get(number)
        return self._older.get(number) if found is None else found

    def pop(self, key: Key) -> int | None:
        number = short(key)
        found = self._newer.pop(number, None)
        return self._older.pop(number, None) if found is None else found

    def clear(self) -> None:
        self._newer.clear()
        self._older.clear()


def short(key: Key) -> int:
    """Return 60 bits of a key."""
    return int.from_bytes(key[:8], "little") & _MASK
