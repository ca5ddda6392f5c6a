"""Token sequences that an answer must not contain, arranged for one look per step.

The last token of a sequence is banned where the tokens before it end the answer. Only generated tokens count. At depth
1 the newest token may still be on the device; then the match up to that token is decided here, and the sampler compares
the token itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Word = tuple[int, ...]


class BadWords:
    """The bad words of one request, grouped by the token one or two places before their last one."""

    def __init__(self, words: Iterable[Word]) -> None:
        unique = list(dict.fromkeys(words))
        self.single = [word[0] for word in unique if len(word) == 1]
        self.longest = max(map(len, unique), default=0)
        self._pairs = [(word[0], word[1]) for word in unique if len(word) == 2]
        self._by_last = _grouped(unique, 2)
        self._by_second_last = _grouped(unique, 3)

    def banned(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that may not follow an answer known in full."""
        if not generated:
            return self.single
        words = self._by_last.get(generated[-1], ())
        return self.single + [word[-1] for word in words if _ends_with(generated, word[:-1])]

    def banned_after(self, generated: Sequence[int]) -> list[tuple[int, int]]:
        """Return (newest token, banned token) pairs for an answer whose newest token, after these, is not known yet."""
        if not generated:
            return self._pairs
        words = self._by_second_last.get(generated[-1], ())
        return self._pairs + [(word[-2], word[-1]) for word in words if _ends_with(generated, word[:-2])]


def _grouped(words: list[Word], place: int) -> dict[int, list[Word]]:
    """Return the words by their token at `place` from the end."""
    found: dict[int, list[Word]] = {}
    for word in words:
        if len(word) >= place:
            found.setdefault(word[-place], []).append(word)
    return found


def _ends_with(tokens: Sequence[int], end: Word) -> bool:
    return len(end) <= len(tokens) and tuple(tokens[-len(end) :]) == end
