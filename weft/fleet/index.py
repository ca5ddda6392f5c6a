"""The router's index: which replicas hold which resume points, mirrored from their journals.

One dictionary maps a key to the bits of all replicas that hold it. Each replica has a lane of four bits, one for each
tier and one for pages, and a set of its keys. A replica whose stream starts over gets a new lane; the bits of the old
one are erased a few keys at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import Key

LANE_BITS = len(Tier)
LANE = (1 << LANE_BITS) - 1
# A page without its state saves nothing. Resume points in lower tiers matter only beyond the device's.
POINTS = LANE & ~(1 << Tier.PAGE)
# Keys whose old bits are erased for each change applied.
ERASED_PER_CHANGE = 8
LEAST_ERASED = 512


@dataclass(slots=True)
class Mirror:
    """The position in one replica's stream. `next` is None until the stream has started."""

    lane: int
    epoch: int = 0
    next: int | None = None
    points: list[int] = field(default_factory=lambda: [0] * LANE_BITS)


class PointIndex:
    def __init__(self) -> None:
        self.masks: dict[Key, int] = {}
        self._free: list[int] = []
        # By lane: the keys that have bits of it.
        self._keys: list[set[Key]] = []
        # Lanes whose bits are to be erased.
        self._dead: list[int] = []

    # streams --------------------------------------------------------------------------------------------------------

    def add(self) -> Mirror:
        """Return a mirror for a new replica."""
        return Mirror(self._new_lane())

    def remove(self, mirror: Mirror) -> None:
        """Forget a replica."""
        self._dead.append(mirror.lane)
        mirror.next = None

    def apply(self, mirror: Mirror, changes: CacheChanges) -> bool:
        """Apply a batch; return False if one before it is missing, so that the stream must start over.

        A batch that was already applied is ignored.
        """
        if changes.fresh:
            self._start_over(mirror, changes)
        elif mirror.next is None or changes.epoch != mirror.epoch or changes.first > mirror.next:
            mirror.next = None
            return False
        elif changes.first < mirror.next:
            return True
        mirror.next = changes.next
        self._enter(mirror, changes)
        self._erase(max(LEAST_ERASED, ERASED_PER_CHANGE * len(changes.keys)))
        return True

    def _start_over(self, mirror: Mirror, changes: CacheChanges) -> None:
        if any(mirror.points):
            self.remove(mirror)
            mirror.lane = self._new_lane()
        mirror.epoch, mirror.points = changes.epoch, [0] * LANE_BITS

    def _enter(self, mirror: Mirror, changes: CacheChanges) -> None:
        masks, shift, points, own = self.masks, LANE_BITS * mirror.lane, mirror.points, self._keys[mirror.lane]
        lane = LANE << shift
        for key, tier, held in zip(changes.keys, changes.tiers, changes.held, strict=True):
            bit, mask = 1 << shift + tier, masks.get(key, 0)
            if held and not mask & bit:
                masks[key] = mask | bit
                points[tier] += 1
                if not mask & lane:
                    own.add(key)
            elif not held and mask & bit:
                points[tier] -= 1
                if not (mask ^ bit) & lane:
                    own.discard(key)
                if mask ^ bit:
                    masks[key] = mask ^ bit
                else:
                    del masks[key]

    # lanes ----------------------------------------------------------------------------------------------------------

    def _new_lane(self) -> int:
        if self._free:
            return self._free.pop()
        self._keys.append(set())
        return len(self._keys) - 1

    def _erase(self, count: int) -> None:
        """Erase the bits of dead lanes from up to `count` keys. A lane is free again when it has none."""
        masks = self.masks
        while self._dead and count:
            lane = self._dead[-1]
            own, others = self._keys[lane], ~(LANE << LANE_BITS * lane)
            while own and count:
                count -= 1
                key = own.pop()
                mask = masks[key] & others
                if mask:
                    masks[key] = mask
                else:
                    del masks[key]
            if not own:
                self._free.append(self._dead.pop())

    # lookups --------------------------------------------------------------------------------------------------------

    def held(self, mirror: Mirror) -> dict[Key, set[Tier]]:
        """Return all resume points of a replica; slow, for reports and tests."""
        shift = LANE_BITS * mirror.lane
        found = ((key, self.masks[key] >> shift) for key in self._keys[mirror.lane])
        return {key: {tier for tier in Tier if mask >> tier & 1} for key, mask in found}

    def known(self, keys: Sequence[Key]) -> int:
        """Return the number of leading cells that some replica holds, with or without a state.

        The pages of a replica are closed under prefixes, so bisection finds their end.
        """
        low, high, masks = 0, len(keys), self.masks
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in masks:
                low = middle
            else:
                high = middle - 1
        return low

    def deepest(self, keys: Sequence[Key], mirrors: Iterable[Mirror]) -> dict[int, list[int]]:
        """Return by lane the number of cells up to the deepest resume point in each tier.

        States exist at some positions only, so a missing key says nothing about those before it: search from the end.
        A point in a lower tier counts only if it is deeper than the device's.
        """
        wanted = 0
        for mirror in mirrors:
            wanted |= POINTS << LANE_BITS * mirror.lane
        found: dict[int, list[int]] = {}
        get = self.masks.get
        for depth in range(len(keys), 0, -1):
            hits = get(keys[depth - 1], 0) & wanted
            while hits:
                bit = hits & -hits
                lane, tier = divmod(bit.bit_length() - 1, LANE_BITS)
                found.setdefault(lane, [0] * LANE_BITS)[tier] = depth
                wanted &= ~(POINTS << LANE_BITS * lane if tier == Tier.DEVICE else bit)
                hits &= wanted
            if not wanted:
                break
        return found
