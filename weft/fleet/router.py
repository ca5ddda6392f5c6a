"""Chooses the replica for a request: the one with the shortest expected time to the first token.

Weighs the tokens that a replica would save, because it holds a resume point of the prompt, against the work that waits
there. Pure logic: it has no sockets, no clock and no randomness, so the same calls give the same choices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from weft.engine.load import ReplicaLoad
from weft.fleet.index import Mirror, PointIndex
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import Key

# Assumed until a replica has measured its own.
PREFILL_TOKENS_PER_SECOND = 10_000.0
SEND_BYTES_PER_SECOND = 1e9
# Weight of a new request in the mean work, and of a new report in a replica's rate of prefill, which varies from step
# to step with the lengths of the prompts.
WORK_SHARE = 0.05
RATE_SHARE = 0.02
# What is left of the recent work with each further request.
RECENT_SHARE = 0.995


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Weights of what counts besides a request's own time to the first token, as multiples of times to compute.

    `work`: computing tokens that another replica has cached delays all later requests of a busy fleet. `pages`: cells
    that a replica holds beyond its resume point need no further memory, and a state will be kept where they end.
    `crowd`: work also delays the requests that wait at the same replica, each this much. `fill`: a replica that got
    more new tokens than another lately would evict sooner.
    """

    work: float = 20.0
    pages: float = 15.0
    crowd: float = 1.0
    fill: float = 0.1


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a request. Of the prompt, `saved` tokens need not be computed; `loaded` of these come from a tier.

    `seconds` is the expected time to the first token; choices are ranked by `cost`.
    """

    replica: str
    saved: int
    loaded: int
    seconds: float
    cost: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request that was sent to a replica and has not ended. `work` is the tokens that it was expected to compute."""

    replica: str
    priority: int
    work: int
    claimed: tuple[Key, ...]


@dataclass(slots=True)
class ReplicaView:
    """What the router knows of a replica. `bit` is its place in the masks of claimed keys."""

    name: str
    bit: int
    mirror: Mirror
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    # Requests without a first token, by number, in the order in which they were sent.
    unstarted: dict[int, Assignment] = field(default_factory=dict)
    open: int = 0
    # Tokens to compute of the requests that it got lately.
    recent: float = 0.0
    # Prompt tokens per second, smoothed; None until it was measured.
    rate: float | None = None
    # Prompt tokens that it had computed when the last request got its first token.
    computed_before: int = 0

    def queued(self, priority: int, mean_work: float) -> float:
        """Return the tokens to compute before a new request of this priority; lower numbers go first."""
        ahead = sum(each.work for each in self.unstarted.values() if each.priority <= priority)
        progress = self.load.prompt_tokens - self.computed_before
        # Requests that wait there without our doing were sent by another router.
        others = max(0, self.load.waiting - len(self.unstarted))
        return max(0, ahead - progress) + others * mean_work


@dataclass(frozen=True, slots=True)
class FleetState:
    """The mean rate of prefill, how busy the fleet is (1: a request waits or is computed at each replica), and the
    fewest new tokens that a replica got lately."""

    rate: float
    busy: float
    least_recent: float


@dataclass(frozen=True, slots=True)
class RequestFacts:
    prompt: int
    priority: int


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """How much of a prompt a replica holds: to its resume point on the device, to one in any tier, and its pages."""

    ready: int
    lower: int
    paged: int


class FleetRouter:
    """`cell` is the length of a cell. Replicas are known by name; ties go to the one that was added first."""

    def __init__(self, cell: int, policy: RoutingPolicy | None = None) -> None:
        self.cell = cell
        self.policy = policy or RoutingPolicy()
        self.index = PointIndex()
        self.replicas: dict[str, ReplicaView] = {}
        self._requests: dict[int, Assignment] = {}
        self._number = 0
        self._mean_work = 0.0
        # Cells that assigned requests are about to compute, with the bits of their replicas.
        self._claims: dict[Key, int] = {}

    # replicas -------------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Add a replica, about which nothing is known yet."""
        assert name not in self.replicas, f"replica {name} was added twice"
        used = {replica.bit for replica in self.replicas.values()}
        bit = next(1 << place for place in range(len(used) + 1) if 1 << place not in used)
        # It gets its share of new requests, not all of them until it has caught up.
        recent = min((replica.recent for replica in self.replicas.values()), default=0.0)
        self.replicas[name] = ReplicaView(name, bit, self.index.add(), recent=recent)

    def remove(self, name: str) -> None:
        """Forget a replica that has gone, and what was assigned to it."""
        replica = self.replicas.pop(name)
        self.index.remove(replica.mirror)
        for number in [number for number, each in self._requests.items() if each.replica == name]:
            self._unclaim(self._requests.pop(number), replica.bit)

    def apply(self, name: str, changes: CacheChanges) -> bool:
        """Mirror changes of a replica's cache; return False if its journal must start over."""
        return self.index.apply(self.replicas[name].mirror, changes)

    def report(self, name: str, load: ReplicaLoad) -> None:
        """Take a replica's own figures of its load."""
        replica = self.replicas[name]
        if load.prompt_tokens < replica.load.prompt_tokens:
            # It has started again.
            replica.computed_before = load.prompt_tokens
        if load.prefill_tokens_per_second is not None:
            known = replica.rate or load.prefill_tokens_per_second
            replica.rate = known + RATE_SHARE * (load.prefill_tokens_per_second - known)
        replica.load = load

    @property
    def pending(self) -> int:
        """Number of requests that have not ended, and of cells that they are expected to compute."""
        return len(self._requests) + len(self._claims)

    # choices --------------------------------------------------------------------------------------------------------

    def choose(
        self,
        keys: Sequence[Key],
        prompt: int,
        priority: int = 0,
        limit: int | None = None,
        without: Collection[str] = (),
    ) -> list[Choice]:
        """Return the replicas for a prompt of this many tokens with these keys of cells, best first.

        At most `limit` tokens may come from a cache (None: all but the last one). `without` are not considered.
        """
        reusable = keys[: min(len(keys), (prompt - 1 if limit is None else min(limit, prompt - 1)) // self.cell)]
        candidates = [replica for replica in self.replicas.values() if replica.name not in without]
        found = self.index.deepest(reusable, [replica.mirror for replica in candidates])
        claimed = self._deepest_claims(reusable)
        fleet, request, choices = self._state(), RequestFacts(prompt, priority), []
        for replica in candidates:
            depths = found.get(replica.mirror.lane, (0,) * len(Tier))
            ready = max(depths[Tier.DEVICE], claimed.get(replica.bit, 0))
            lower = max(depths[Tier.DEVICE : Tier.PAGE])
            held = HeldTokens(ready * self.cell, lower * self.cell, depths[Tier.PAGE] * self.cell)
            choices.append(self._price(replica, fleet, request, held))
        return sorted(choices, key=lambda choice: choice.cost)

    def _price(self, replica: ReplicaView, fleet: FleetState, request: RequestFacts, held: HeldTokens) -> Choice:
        rate, policy = replica.rate or fleet.rate, self.policy
        saved, loading = held.ready, 0.0
        if held.lower > held.ready:
            loading = replica.load.load_seconds(held.lower - held.ready)
            if loading < (held.lower - held.ready) / rate:
                saved = held.lower
            else:
                loading = 0.0
        left, waiting = request.prompt - saved, replica.queued(request.priority, self._mean_work)
        computing = left / rate + loading
        seconds = waiting / rate + computing
        # The rest is the same for replicas that hold the same, however their rates were measured.
        shared = policy.work * left - policy.pages * max(0, held.paged - saved)
        extra = fleet.busy * shared + policy.crowd * len(replica.unstarted) * left
        extra += policy.fill * (replica.recent - fleet.least_recent)
        return Choice(replica.name, saved, saved - held.ready, seconds, seconds + extra / fleet.rate)

    def _state(self) -> FleetState:
        replicas = self.replicas.values()
        rates = [replica.rate for replica in replicas if replica.rate is not None]
        unstarted = sum(len(replica.unstarted) for replica in replicas)
        return FleetState(
            sum(rates) / len(rates) if rates else PREFILL_TOKENS_PER_SECOND,
            min(1.0, unstarted / max(1, len(replicas))),
            min((replica.recent for replica in replicas), default=0.0),
        )

    def pays_apart(self, here: Choice, there: Choice, prompt: int) -> bool:
        """Return whether a prompt is better computed `there` and sent to the replica that answers, `here`.

        Computing it here takes its own time, and makes the answers that run here wait as long. Sending overlaps with
        computing; the slower of the two counts. Then the prefix is loaded.
        """
        decoder, prefiller = self.replicas[here.replica], self.replicas[there.replica]
        load, left = decoder.load, prompt - here.saved
        rate = decoder.rate or self._state().rate
        stall = left / rate if load.running else 0.0
        size = left * load.token_bytes + load.point_bytes
        transfer = size / (prefiller.load.send_bytes_per_second or SEND_BYTES_PER_SECOND)
        apart = max(there.seconds, transfer) + load.load_seconds(left) + self.cell / rate
        return apart < here.seconds + stall

    # requests -------------------------------------------------------------------------------------------------------

    def assign(self, choice: Choice, keys: Sequence[Key], prompt: int, priority: int = 0) -> int:
        """Record that a request goes to a replica, and return its number.

        From now on its work counts there, and the cells that it will compute count as held.
        """
        replica, work = self.replicas[choice.replica], prompt - choice.saved
        cells = keys[choice.saved // self.cell : prompt // self.cell]
        claimed = tuple(key for key in cells if not self._claims.get(key, 0) & replica.bit)
        for key in claimed:
            self._claims[key] = self._claims.get(key, 0) | replica.bit
        self._number += 1
        self._requests[self._number] = Assignment(choice.replica, priority, work, claimed)
        replica.unstarted[self._number] = self._requests[self._number]
        replica.open += 1
        for each in self.replicas.values():
            each.recent *= RECENT_SHARE
        replica.recent += work
        self._mean_work += WORK_SHARE * (work - self._mean_work)
        return self._number

    def started(self, number: int) -> None:
        """Record the first token of a request: its prompt is computed. Ignores unknown numbers."""
        assignment = self._requests.get(number)
        if assignment is None:
            return
        replica = self.replicas[assignment.replica]
        if replica.unstarted.pop(number, None) is not None:
            replica.computed_before = replica.load.prompt_tokens
            self._unclaim(assignment, replica.bit)

    def ended(self, number: int) -> None:
        """Record the end of a request, for whatever reason. Ignores unknown numbers."""
        self.started(number)
        assignment = self._requests.pop(number, None)
        if assignment is not None:
            self.replicas[assignment.replica].open -= 1

    def _unclaim(self, assignment: Assignment, bit: int) -> None:
        for key in assignment.claimed:
            left = self._claims.get(key, 0) & ~bit
            if left:
                self._claims[key] = left
            else:
                self._claims.pop(key, None)

    def _deepest_claims(self, keys: Sequence[Key]) -> dict[int, int]:
        """Return, by the bits of replicas, the number of cells that requests on their way there will have computed."""
        found: dict[int, int] = {}
        seen, claims = 0, self._claims
        for depth in range(len(keys), 0, -1) if claims else ():
            new = claims.get(keys[depth - 1], 0) & ~seen
            seen |= new
            while new:
                found[new & -new] = depth
                new &= new - 1
        return found
