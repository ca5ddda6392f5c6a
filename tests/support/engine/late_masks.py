"""Constraints whose masks depend on every token, and a device that runs ahead of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.hashed.rolling import VOCABULARY, RollingDevice, mix
from weft.base.plan import Ints


class HashedConstraint:
    """Allows about half of the tokens, which ones depends on all tokens before."""

    ended = slow = False
    seconds = 0.0

    def __init__(self, state: int, vocabulary: int = VOCABULARY) -> None:
        self.state = state
        self.vocabulary = vocabulary

    def allows(self, token: int) -> bool:
        return token == self.state % self.vocabulary or mix(self.state, token) % 2 == 0

    @property
    def mask(self) -> Ints:
        bits = np.zeros(-(-self.vocabulary // 32) * 32, np.uint8)
        bits[: self.vocabulary] = [self.allows(token) for token in range(self.vocabulary)]
        return np.packbits(bits, bitorder="little").view(np.int32)

    def look_ahead(self) -> HashedAhead:
        return HashedAhead(self.state, self.vocabulary)

    def masks_along(self, tokens: Sequence[int]) -> list[Ints]:
        ahead, found = HashedConstraint(self.state, self.vocabulary), []
        for token in tokens:
            if not ahead.allows(token):
                break
            ahead.take(token)
            found.append(ahead.mask)
        return found

    def foresees(self, token: int) -> bool:
        return False

    def take(self, token: int) -> None:
        assert self.allows(token), "the mask of another position was used"
        self.state = mix(self.state, token + 1)


class HashedAhead(HashedConstraint):
    """A look ahead of such an answer."""

    def forced(self) -> int | None:
        allowed = [token for token in range(self.vocabulary) if self.allows(token)]
        return allowed[0] if len(allowed) == 1 else None

    def take(self, token: int) -> bool:
        super().take(token)
        return True


class EarlyDevice(RollingDevice):
    """A device that samples with the launch."""

    supply_masks = None
