"""Chooses what is copied to the tier below, and when: shortly before the upper tier evicts it, and not earlier.

While memory is free, nothing is copied. When less than a reserve is free, the next candidates for eviction are copied
in the order in which they would go, until the reserve can be freed without losing anything. States that nothing has
wanted are not worth a copy, nor those of a class that is seldom wanted, unless copies cost less than what they save.

A tier that outlives the process also gets what was kept, while the engine has nothing else to do and when it closes. If
there are two, a file and a remote store, the second gets what was saved to the first, as long as memory still has it.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.memory.cache import Cache
from weft.memory.captures import Origin
from weft.memory.eviction import Candidate
from weft.memory.keys import Key
from weft.memory.popularity import SELDOM, TRIAL
from weft.memory.tiers.saves import Saves
from weft.memory.trie import Node, ResumePoint, path

# The reserve is at least this share of the memory, but no more than these bytes, unless steps take more.
LEAST_SHARE, LEAST_BYTES = 1 / 8, 256 << 20
# The reserve covers this many steps like the largest of the last ones.
STEPS_AHEAD = 2
# After each step, the largest demand counts this much less.
DECAY = 0.999
# Kept paths that wait until the engine is idle, beyond which those that were evicted are forgotten. So at most twice as
# many wait as are cached.
LEAST_KEPT = 1 << 10


class Demotion:
    """`copy_pays` returns whether a copy pays for a point that is seldom wanted, by its chance, the tokens that it
    saves, and its bytes; None: it never does. `follows`: another tier decides what is saved, and when."""

    def __init__(
        self,
        upper: Cache,
        saves: Saves,
        copy_pays: Callable[[float, int, int], bool] | None = None,
        follows: bool = False,
    ) -> None:
        self.upper = upper
        self.saves = saves
        # Bytes of candidates whose copies are under way.
        self.under_way_bytes = 0
        self.unworthy = 0
        self.follows = follows
        self._copy_pays = copy_pays
        arena = upper.arena
        self.least_bytes = min(LEAST_BYTES, int(LEAST_SHARE * arena.slabs * arena.slab_bytes))
        self._demand = 0.0
        self._taken = upper.taken_bytes
        # Kept paths that wait until the engine is idle, oldest first.
        self._kept: dict[Key, None] = {}
        self._most_kept = LEAST_KEPT

    # what is evicted next -------------------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Learn from the bytes that were taken since the last call."""
        taken = self.upper.taken_bytes - self._taken
        self._taken = self.upper.taken_bytes
        self._demand = max(taken, self._demand * DECAY)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that must be free, or could be freed without a loss."""
        return max(self.least_bytes, int(STEPS_AHEAD * self._demand))

    @property
    def short(self) -> bool:
        arena = self.upper.arena
        free = (arena.slabs - arena.used_slabs) * arena.slab_bytes
        return free + self.upper.valuation.staged_bytes + self.under_way_bytes < self.reserve_bytes

    def demote(self) -> bool:
        """Begin to save the next path to be evicted; return whether there was one that must be saved now."""
        valuation = self.upper.valuation
        while self.short:
            victim = valuation.pop_next()
            if victim is None:
                return False
            node = victim.node if isinstance(victim, ResumePoint) else victim
            if self._has(node) or not self._is_worth(victim):
                valuation.stage(victim)
                continue
            self._begin(node, victim)
            return True
        return False

    def _has(self, node: Node) -> bool:
        """Return whether the tier below has a path; the one after it may lack it."""
        has = self.saves.has(node)
        if has:
            self.saves.saved(node.key)
        return has

    def _begin(self, node: Node, victim: Candidate) -> None:
        size = self.upper.valuation.reach_bytes(victim)
        self.under_way_bytes += size

        def done() -> None:
            self.under_way_bytes -= size
            self.upper.valuation.stage(victim)

        self.saves.begin(node, self.upper.valuation.score(victim), done)

    def _is_worth(self, victim: Candidate) -> bool:
        """Return whether a candidate is likely enough to be wanted again. Of the unlikely paths, a few are tried."""
        if not isinstance(victim, ResumePoint) or not self.upper.valuation.by_value:
            return True
        if victim.origin is Origin.CANDIDATE:
            return False
        valuation = self.upper.valuation
        chance, pays = valuation.popularity.chance(victim.kind), self._copy_pays
        if chance >= SELDOM:
            return True
        if pays is not None and pays(chance, valuation.reach_tokens(victim), valuation.reach_bytes(victim)):
            return True
        # By path: all of its points share most of what is copied.
        tried = path(victim.node)[0].key[0] % TRIAL == 0
        self.unworthy += not tried
        return tried

    # what outlives the process --------------------------------------------------------------------------------------

    def kept(self, key: Key) -> None:
        """Remember a path that was kept, until the engine is idle."""
        self._kept.pop(key, None)
        self._kept[key] = None
        if len(self._kept) > self._most_kept:
            self._forget_evicted()

    def _forget_evicted(self) -> None:
        """Forget paths that were evicted before the engine was idle. At least as many are kept before the next time."""
        nodes = self.upper.trie.nodes
        held = {key: None for key in self._kept if key in nodes}
        self.saves.dropped += self.follows * (len(self._kept) - len(held))
        self._kept, self._most_kept = held, max(LEAST_KEPT, 2 * len(held))

    @property
    def behind(self) -> bool:
        """Whether kept paths wait to be saved."""
        return bool(self._kept)

    def write_behind(self) -> bool:
        """Begin to save the path that was kept last; return whether there was one."""
        while self._kept:
            key, _ = self._kept.popitem()
            node = self.upper.trie.nodes.get(key)
            if node is None:
                self.saves.dropped += self.follows
                continue
            if self._has(node):
                continue
            if node.resume is None and self.upper.point_bytes:
                continue
            victim: Candidate = node if node.resume is None else node.resume
            if self._is_worth(victim):
                self.saves.begin(node, self.upper.valuation.score(victim), lambda: None)
                return True
        return False
