"""The tiers below the device's memory, seen from the ledger: what to save, what to bring back, and how much of it.

A tier is a `Cache` with an arena of its own, so that one policy values all of them. Each holds whole paths from the
root: a lookup combines the pages of one tier with the resume point of another. Neighbouring tiers are joined by links;
what lies two tiers down is brought up one link after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

from weft.base.copies import CopyPlan
from weft.memory.cache import Cache
from weft.memory.keys import Key
from weft.memory.misses import Miss, Reason
from weft.memory.tenancy import Tenancy
from weft.memory.tiers.exchange.arrivals import ArrivalsLink
from weft.memory.tiers.link import LowerTier, TierLink
from weft.memory.tiers.load_choice import FoundPrefix, LoadChoice
from weft.memory.trie import Node

# A request whose loaded prefix was evicted again before it could start is computed after this many loads of a link.
MOST_LOADS = 2
# Cells of a file that are looked at or entered in one step; what a lookup needs is entered at once.
RESTORED_PER_STEP = 128
# Plans of copies in one direction that are begun in one step.
MOST_PLANS = 8
IN_TIER = {
    "host": Reason.IN_HOST,
    "disk": Reason.IN_DISK,
    "remote": Reason.IN_REMOTE,
    "arrivals": Reason.IN_ARRIVALS,
}
# What takes less time to compute is not worth asking a remote store for.
LEAST_SECONDS_TO_ASK = 0.01


def _chained(upper: Cache, lowers: Sequence[LowerTier], tenancy: Tenancy) -> tuple[TierLink, ...]:
    """Return the links of a chain of tiers, made from below: each link reports what it has saved to the next one."""
    uppers = [upper]
    for tier in lowers[:-1]:
        # Tiers that outlive the process lie side by side below memory.
        uppers.append(uppers[-1] if tier.labelled else tier.cache)
    links: list[TierLink] = []
    # What reaches the disk from the device passes through host memory.
    writes_behind = bool(lowers) and lowers[-1].labelled
    for level, tier in reversed(list(enumerate(lowers))):
        # What the first of two such tiers has, the second gets.
        follows = level > 0 and uppers[level] is uppers[level - 1]
        saved = links[0].demotion.kept if links and writes_behind else lambda key: None
        links.insert(0, TierLink(level, uppers[level], tier, tenancy.of, writes_behind, follows, saved))
    return tuple(links)


class Tiers:
    """The links below the device's memory, nearest first. `waiter` is the number of a request in the queue.

    Links of the chain join neighbours. A file and a remote store have the same upper tier, the last one in memory.
    Arrivals, the last link if there are any, lie below the device and beside the chain.
    """

    def __init__(
        self,
        upper: Cache,
        lowers: Sequence[LowerTier],
        tenancy: Tenancy,
        arrivals: Cache | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.upper = upper
        self.chain = _chained(upper, lowers, tenancy)
        self.arrivals = None if arrivals is None else ArrivalsLink(len(self.chain), upper, arrivals, tenancy)
        self.links: tuple[TierLink, ...] = self.chain if self.arrivals is None else (*self.chain, self.arrivals)
        self.discovery = next((link.discovery for link in self.chain if link.discovery is not None), None)
        self.choice = LoadChoice(self.links, self.upper.cell)
        self.slower = 0
        self.given_up = 0
        self.clock = clock
        # By level: when copies landed last.
        self._progress: dict[int, float] = {}
        # By request and level: how many loads it has waited for, and the interval of tokens that they brought.
        self._tried: dict[tuple[int, int], int] = {}
        self._brought: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def host(self) -> TierLink | None:
        """The link to host memory, if there is some."""
        return next((link for link in self.chain[:1] if not link.saves.labelled), None)

    @property
    def in_flight(self) -> int:
        """Number of copies that hold memory until they land."""
        return sum(link.in_flight for link in self.links)

    @property
    def busy(self) -> bool:
        return any(link.busy for link in self.links)

    @property
    def moving(self) -> bool:
        """Whether paths are on their way between tiers."""
        return any(link.moving for link in self.links)

    def under_way(self) -> Iterator[Key]:
        """Yield the cells that saves and transfers will publish."""
        for link in self.links:
            yield from link.under_way()

    # copies ---------------------------------------------------------------------------------------------------------

    def plan_loads(self) -> Iterator[CopyPlan]:
        """Yield the next copies for requests that wait."""
        for link in self.links:
            for _ in range(MOST_PLANS):
                plan = link.plan_load()
                if plan is None:
                    break
                yield plan

    def plan_saves(self, idle: bool = False) -> Iterator[CopyPlan]:
        """Yield the next copies to the tiers below; call it once per step. `idle`: also of what need not be saved yet.

        A device that has begun copies reports their landing in this order, by link and direction.
        """
        for link in self.links:
            if not idle:
                link.demotion.note_step()
            for _ in range(MOST_PLANS):
                plan = link.plan_save(idle)
                if plan is None:
                    break
                yield plan

    def restore_some(self, most: int = RESTORED_PER_STEP) -> None:
        """Enter a part of what the file of a tier holds since the last process."""
        for link in self.links:
            link.restore_some(most)

    def restore_all(self) -> None:
        """Enter everything that the file of a tier holds."""
        for link in self.links:
            while link.restoring is not None:
                link.restore_some(1 << 16)

    def plan_begun(self) -> Iterator[CopyPlan]:
        """Yield the next copies of paths whose saves were begun, and of no others."""
        for link in self.links:
            plan = link.plan_begun()
            if plan is not None:
                yield plan

    @property
    def behind(self) -> bool:
        """Whether a tier that outlives the process lacks paths that were kept."""
        return any(link.writes_behind and link.demotion.behind for link in self.links)

    def landed(self, plan: CopyPlan, seconds: float) -> None:
        """Publish what a plan has copied."""
        self._progress[plan.level] = self.clock()
        self.links[plan.level].landed(plan, seconds)

    def failed(self, plan: CopyPlan) -> None:
        """Give up what a plan could not copy."""
        self.links[plan.level].failed(plan)

    def computed(self, tokens: int, seconds: float) -> None:
        """Refine the rate of prefill, which loads compete with."""
        for link in self.links:
            link.rates.computed(tokens, seconds)

    # requests -------------------------------------------------------------------------------------------------------

    def find(self, keys: list[Key], limit: int, match: Miss) -> list[FoundPrefix]:
        """Return where more of a prompt lies than `match`, what saves most first."""
        return self.choice.find(keys, limit, match)

    def known_cells(self, keys: list[Key]) -> int:
        """Return how many cells of a prefix need not be sent here: a request can have their pages on the device.

        Pages on the device count. From a tier of the chain a request loads no more than up to a resume point.
        """
        above = self.upper.trie.deepest(keys)
        depth, limit = 0 if above is None else above.depth, len(keys) * self.upper.cell
        for link in self.chain:
            node = link.deepest(keys, limit)
            depth = max(depth, 0 if node is None else node.depth)
        return depth if self.arrivals is None else self.arrivals.reaches(keys, depth)

    def bring(
        self,
        waiter: int,
        keys: list[Key],
        limit: int,
        match: Miss,
        tenant: Callable[[], bytes] | None = None,
        ahead_tokens: int = 0,
    ) -> bool:
        """Return whether a request should wait, because more of its prefix than `match` is on its way up.

        `tenant` returns the digest of its tenant, for a store that is asked whether it has more. `ahead_tokens` are
        computed before those of the request, if it starts now.
        """
        self.choice.ahead_tokens = ahead_tokens
        if self._awaits(waiter, match):
            return True
        if tenant is not None and self._asks(waiter, keys, limit, match, tenant):
            return True
        for source in self.find(keys, limit, match):
            if self._tried.get((waiter, source.level), 0) < MOST_LOADS and source.pays:
                self._begin(waiter, keys, source, match)
                return True
        return False

    def _awaits(self, waiter: int, match: Miss) -> bool:
        """Return whether a request waits for a load. It gives one up if computing what is left is faster by now."""
        for link in self.links:
            load = link.loads.awaited_by(waiter)
            if load is None:
                continue
            silent = self.clock() - max(load.began, self._progress.get(link.level, load.began))
            if not self.choice.is_late(link, load, match.cached, silent):
                return True
            link.loads.leave(waiter)
            # Its rate may look better in a moment, but this request starts now.
            self._tried[waiter, link.level] = MOST_LOADS
            self.given_up += 1
        return False

    def _asks(self, waiter: int, keys: list[Key], limit: int, match: Miss, tenant: Callable[[], bytes]) -> bool:
        """Return whether a request waits for the answers of a remote store."""
        discovery = self.discovery
        if discovery is None:
            return False
        # The nearer tiers, arrivals included.
        nodes = [link.deepest(keys, limit) for link in self.links if link.discovery is None]
        cell = self.upper.cell
        least = max([match.cached // cell, *(node.depth for node in nodes if node is not None)])
        seconds = self.links[0].rates.compute_seconds(match.reusable - least * cell)
        if seconds is not None and seconds < LEAST_SECONDS_TO_ASK:
            return False
        return discovery.awaited_by(waiter, keys, limit, least, tenant())

    def await_answers(self, seconds: float) -> None:
        """Give a remote store a little time to answer, because there is nothing else to do."""
        if self.discovery is not None:
            self.discovery.wait(seconds)

    def close(self) -> None:
        if self.discovery is not None:
            self.discovery.close()

    def _begin(self, waiter: int, keys: list[Key], source: FoundPrefix, match: Miss) -> None:
        link, place = self.links[source.level], (waiter, source.level)
        above = link.upper.trie.deepest(keys[: source.node.depth])
        link.loads.begin(waiter, keys, 0 if above is None else above.depth, source.node, self.clock())
        self._tried[place] = self._tried.get(place, 0) + 1
        # A second load continues where the first one ended early.
        cached = self._has(link.upper, keys, match)
        self._brought[place] = (min(cached, self._brought.get(place, (cached, 0))[0]), source.tokens)

    def _has(self, tier: Cache, keys: list[Key], match: Miss) -> int:
        """Return up to where a tier has a prompt already."""
        return match.cached if tier is self.upper else max(match.cached, tier.match(keys, match.reusable).cached)

    def explain(self, keys: list[Key], limit: int, miss: Miss) -> Miss:
        """Return the miss with its reason, if a tier below has more than the request starts from."""
        found = self.find(keys, limit, miss)
        if not found:
            silent = self.discovery is not None and self.discovery.silent(keys)
            return replace(miss, reason=Reason.REMOTE_SILENT) if silent and miss.tokens_lost else miss
        slower = not any(source.pays for source in found)
        if slower:
            self.slower += 1
            self.links[found[0].level].rates.declined()
        return replace(miss, reason=Reason.LOAD_SLOWER if slower else IN_TIER[self.links[found[0].level].name])

    def leave(self, waiter: int, cached: int = 0) -> dict[str, int]:
        """Forget a request that has started with `cached` tokens, or ended; return how many came from which tier."""
        loaded: dict[str, int] = {}
        # What came from further down was then loaded by the links above it too.
        counted = cached
        if self.discovery is not None:
            self.discovery.leave(waiter)
        for link in reversed(self.links):
            link.loads.leave(waiter)
            self._tried.pop((waiter, link.level), None)
            first, end = self._brought.pop((waiter, link.level), (0, 0))
            tokens = max(0, min(counted, end) - first)
            if tokens:
                loaded[link.name] = tokens
                link.loaded_tokens += tokens
                counted = min(counted, first)
        return loaded

    # what the device keeps ------------------------------------------------------------------------------------------

    def opened(self, keys: list[Key], limit: int, node: Node | None) -> None:
        """Record a lookup: what it started from is worth keeping in the tiers below too."""
        for link in self.links:
            match = link.lower.match(keys, limit)
            known = None if node is None else link.lower.trie.nodes.get(node.key)
            if known is not None:
                link.lower.started(known, link.lower.lost_state(keys, match) is not None)
            link.lower.looked_up(None, keys, match)

    def kept(self, key: Key) -> None:
        """Note a path that the device has kept, for a tier that outlives the process."""
        if self.links[0].writes_behind:
            self.links[0].demotion.kept(key)

    def clear(self) -> None:
        """Drop everything that no copy uses."""
        self.restore_all()
        for link in self.links:
            link.lower.clear()
        self.forget()

    def forget(self) -> None:
        """Let a tier that outlives the process forget what was just dropped."""
        for link in self.links:
            link.saves.forget()

    # drops ----------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Give up all copies, so that none of them brings back what is about to be dropped."""
        for link in self.links:
            link.abandon()
        if self.discovery is not None:
            self.discovery.stop_asking()

    def ask_again(self) -> None:
        """Let requests ask a remote store again: no drop is under way any more."""
        if self.discovery is not None:
            self.discovery.ask_again()

    def contradicts(self, keys: list[Key]) -> bool:
        """Return whether keys from outside are not those of one prefix, as far as is known here."""
        tries = [self.upper.trie, *(link.lower.trie for link in self.links)]
        return len(set(keys)) < len(keys) or any(trie.contradicts(keys) for trie in tries)

    def set_dropping(self, dropping: bool) -> None:
        """Say whether a drop is under way: what a file evicts meanwhile is overwritten, as it may be part of it."""
        for link in self.links:
            link.saves.erasing.dropping = dropping and link.overwrites

    @contextmanager
    def erasing_freed(self) -> Iterator[None]:
        """Overwrite what is freed inside in tiers that outlive the process."""
        with ExitStack() as stack:
            for link in self.links:
                if link.overwrites:
                    stack.enter_context(link.saves.erasing.taking_freed())
            yield

    @property
    def restoring(self) -> bool:
        """Whether units of a file are still to be entered."""
        return any(link.restoring is not None for link in self.links)

    @property
    def erasing(self) -> bool:
        """Whether dropped units of a file are being overwritten."""
        return any(link.saves.erasing.busy for link in self.links)

    @property
    def erasing_failed(self) -> bool:
        return any(link.saves.erasing.failed for link in self.links)

    def drop_stored(self, tenant: bytes | None, prefix: bytes | None) -> Future[None] | None:
        """Begin to drop objects from a remote store, if there is one."""
        return None if self.discovery is None else self.discovery.drop(tenant, prefix)

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges for metrics, by tier."""
        return {link.name: link.stats() for link in self.links}
