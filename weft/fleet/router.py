"""Chooses the replica for a request: the one with the shortest expected time to the first token.

Weighs the tokens that a replica would save, because it holds a resume point of the prompt, against the work that waits
there. Pure logic: it has no sockets and no randomness, and its caller's clock, so the same calls at the same times give
the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic

from weft.engine.load import ReplicaLoad
from weft.fleet.index import Mirror, PointIndex
from weft.fleet.pricing import PromptSpeed, PromptWork, mean_speed, seconds_until_released, seconds_until_room
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import Key

# Assumed until a replica has measured its own: the speed of prefill, how long a request keeps its seat, and the rate of
# transfers.
PROMPT_SPEED = PromptSpeed(1e-4)
ANSWER_SECONDS = 10.0
SEND_BYTES_PER_SECOND = 1e9
NOTHING = PromptWork(0, 0.0)
# Weight of a new request in the mean work, and of an answer in the mean time that a request keeps its seat.
WORK_SHARE = 0.05
ANSWER_SHARE = 0.02
# What is left of the recent work with each further request.
RECENT_SHARE = 0.995
# A replica that works reports more often than this. Without a report for longer, no further progress is assumed.
SILENT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Weights of what counts besides a request's own time to the first token, as multiples of times to compute.

    `work`: computing tokens that another replica has cached delays all later requests of a busy fleet. `crowd`: work
    also delays the requests that wait at the same replica, each this much. `fill`: a replica that got more new tokens
    than another lately would evict sooner, if it gets further ones.
    """

    work: float = 20.0
    crowd: float = 1.0
    fill: float = 0.1


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a request. Of the prompt, `saved` tokens need not be computed; `loaded` of these come from a tier.

    `seconds` is the expected time to the first token; choices are ranked by `cost`. `junction` is where the prompt
    parts from all that any replica has computed, if that lies beyond what is saved: a state is worth keeping there.
    """

    replica: str
    saved: int
    loaded: int
    seconds: float
    cost: float
    junction: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request that was sent to a replica and has not ended. `work` is what it was expected to compute there."""

    replica: str
    priority: int
    work: PromptWork
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
    # None until it was measured.
    speed: PromptSpeed | None = None
    # How long a request keeps its seat after its first token; None until it was measured.
    answer_seconds: float | None = None
    # What it had computed when the last request got its first token.
    computed_before: PromptWork = NOTHING
    # When it last reported, or got a request while it had none: since then it has computed without a report.
    since: float = 0.0

    def queued(self, priority: int, mean_work: float) -> PromptWork:
        """Return what was to be computed at the last report before a new request; lower priorities go first."""
        tokens = pairs = 0.0
        for each in self.unstarted.values():
            if each.priority <= priority:
                tokens += each.work.tokens
                pairs += each.work.pairs
        tokens = max(0.0, tokens - self.load.prompt_tokens + self.computed_before.tokens)
        pairs = max(0.0, pairs - self.load.prompt_pairs + self.computed_before.pairs)
        # Requests that wait there without our doing were sent by another router.
        others = max(0, self.load.waiting - len(self.unstarted))
        return PromptWork(tokens + others * mean_work, pairs)

    def seat_seconds(self, priority: int, keeping: float) -> float:
        """Return the expected time until a new request gets a seat; each is kept for `keeping` seconds on average."""
        seats, sent = self.load.max_sequences, max(self.open, self.load.running + self.load.waiting)
        if sent < seats or not seats:
            return 0.0
        # Requests of a lower priority let it pass, unless they have a seat already.
        passed = min(sent - seats, sum(each.priority > priority for each in self.unstarted.values()))
        return seconds_until_released(sent - seats - passed, 1, seats, keeping)

    def memory_seconds(self, queued: float, prompt: int, keeping: float) -> float:
        """Return the expected time until running sequences leave room for the queued tokens and then for the prompt."""
        load = self.load
        free, own = load.memory_bytes - load.held_bytes, prompt * load.token_bytes + 2 * load.point_bytes
        return seconds_until_room(queued * load.token_bytes, own, free, load.held_bytes, load.running, keeping)


@dataclass(frozen=True, slots=True)
class FleetState:
    """Means of what replicas have measured, how busy the fleet is (1: a request waits or is computed at each replica),
    and the fewest new tokens that a replica got lately."""

    speed: PromptSpeed
    answer_seconds: float
    busy: float
    least_recent: float
    now: float


@dataclass(frozen=True, slots=True)
class RequestFacts:
    prompt: int
    priority: int
    known: int  # tokens that some replica has computed, or is about to


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """How much of a prompt a replica holds: to its resume point on the device, and to one in any tier."""

    ready: int
    lower: int


class FleetRouter:
    """`cell` is the length of a cell. Replicas are known by name; ties go to the one that was added first."""

    def __init__(self, cell: int, policy: RoutingPolicy | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.cell = cell
        self.policy = policy or RoutingPolicy()
        self.clock = clock
        self.index = PointIndex()
        self.replicas: dict[str, ReplicaView] = {}
        self._requests: dict[int, Assignment] = {}
        self._number = 0
        self._mean_work = 0.0
        # When requests that have not ended got their first token.
        self._started: dict[int, float] = {}
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
            self._started.pop(number, None)

    def apply(self, name: str, changes: CacheChanges) -> bool:
        """Mirror changes of a replica's cache; return False if its journal must start over."""
        return self.index.apply(self.replicas[name].mirror, changes)

    def report(self, name: str, load: ReplicaLoad) -> None:
        """Take a replica's own figures of its load."""
        replica = self.replicas[name]
        if load.prompt_tokens < replica.load.prompt_tokens:
            # It has started again.
            replica.computed_before = PromptWork(load.prompt_tokens, load.prompt_pairs)
        if load.token_seconds is not None:
            replica.speed = PromptSpeed(load.token_seconds, load.pair_seconds)
        replica.load, replica.since = load, self.clock()

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
        known = max(self.index.known(reusable), max(claimed.values(), default=0)) * self.cell
        fleet, request, choices = self._state(), RequestFacts(prompt, priority, known), []
        for replica in candidates:
            depths = found.get(replica.mirror.lane, (0,) * len(Tier))
            ready = max(depths[Tier.DEVICE], claimed.get(replica.bit, 0))
            lower = max(depths[Tier.DEVICE : Tier.PAGE])
            held = HeldTokens(ready * self.cell, lower * self.cell)
            choices.append(self._price(replica, fleet, request, held))
        return sorted(choices, key=lambda choice: choice.cost)

    def _price(self, replica: ReplicaView, fleet: FleetState, request: RequestFacts, held: HeldTokens) -> Choice:
        speed, policy = replica.speed or fleet.speed, self.policy
        saved, loading = held.ready, 0.0
        if held.lower > held.ready:
            loading = replica.load.load_seconds(held.lower - held.ready)
            if loading < speed.seconds(PromptWork.between(held.ready, held.lower)):
                saved = held.lower
            else:
                loading = 0.0
        work = PromptWork.between(saved, request.prompt)
        seconds = self._waiting(replica, fleet, request) + speed.seconds(work) + loading
        # The rest is the same for replicas that hold the same, however their speeds were measured.
        new = policy.work * fleet.busy + policy.crowd * len(replica.unstarted)
        extra = new * fleet.speed.seconds(work)
        ahead = fleet.speed.token_seconds * (replica.recent - fleet.least_recent)
        extra += policy.fill * ahead * work.tokens / max(1, request.prompt)
        junction = request.known if request.known > saved else None
        return Choice(replica.name, saved, saved - held.ready, seconds, seconds + extra, junction)

    def _waiting(self, replica: ReplicaView, fleet: FleetState, request: RequestFacts) -> float:
        """Return the expected time until a replica can start on a request.

        Prompts ahead of it are computed while seats and memory become free, so the longest of these waits counts.
        """
        queued = replica.queued(request.priority, self._mean_work)
        done = min(fleet.now - replica.since, SILENT_SECONDS) if replica.unstarted else 0.0
        keeping = fleet.answer_seconds if replica.answer_seconds is None else replica.answer_seconds
        return max(
            0.0,
            (replica.speed or fleet.speed).seconds(queued) - done,
            replica.seat_seconds(request.priority, keeping),
            replica.memory_seconds(queued.tokens, request.prompt, keeping),
        )

    def _state(self) -> FleetState:
        replicas = self.replicas.values()
        unstarted = sum(len(replica.unstarted) for replica in replicas)
        answers = [each.answer_seconds for each in replicas if each.answer_seconds is not None]
        return FleetState(
            mean_speed([replica.speed for replica in replicas if replica.speed is not None]) or PROMPT_SPEED,
            sum(answers) / len(answers) if answers else ANSWER_SECONDS,
            min(1.0, unstarted / max(1, len(replicas))),
            min((replica.recent for replica in replicas), default=0.0),
            self.clock(),
        )

    def pays_disaggregated(self, here: Choice, there: Choice, prompt: int) -> bool:
        """Return whether a prompt is better computed `there` and sent to the replica that answers, `here`.

        Computing it here takes its own time, and makes the answers that run here wait as long. Sending overlaps with
        computing; the slower of the two counts. Then the prefix is loaded.
        """
        decoder, prefiller = self.replicas[here.replica], self.replicas[there.replica]
        load, left = decoder.load, prompt - here.saved
        speed = decoder.speed or self._state().speed
        stall = speed.seconds(PromptWork.between(here.saved, prompt)) if load.running else 0.0
        size = left * load.token_bytes + load.point_bytes
        transfer = size / (prefiller.load.send_bytes_per_second or SEND_BYTES_PER_SECOND)
        rest = speed.seconds(PromptWork.between(prompt - self.cell, prompt))
        disaggregated = max(there.seconds, transfer) + load.load_seconds(left) + rest
        return disaggregated < here.seconds + stall

    # requests -------------------------------------------------------------------------------------------------------

    def assign(self, choice: Choice, keys: Sequence[Key], prompt: int, priority: int = 0) -> int:
        """Record that a request goes to a replica, and return its number.

        From now on its work counts there, and the cells that it will compute count as held.
        """
        replica, work = self.replicas[choice.replica], PromptWork.between(choice.saved, prompt)
        cells = keys[choice.saved // self.cell : prompt // self.cell]
        claimed = tuple(key for key in cells if not self._claims.get(key, 0) & replica.bit)
        for key in claimed:
            self._claims[key] = self._claims.get(key, 0) | replica.bit
        self._number += 1
        self._requests[self._number] = Assignment(choice.replica, priority, work, claimed)
        if not replica.unstarted:
            replica.since = self.clock()
        replica.unstarted[self._number] = self._requests[self._number]
        replica.open += 1
        for each in self.replicas.values():
            each.recent *= RECENT_SHARE
        replica.recent += work.tokens
        self._mean_work += WORK_SHARE * (work.tokens - self._mean_work)
        return self._number

    def started(self, number: int) -> None:
        """Record the first token of a request: its prompt is computed. Ignores unknown numbers."""
        assignment = self._requests.get(number)
        if assignment is None:
            return
        replica = self.replicas[assignment.replica]
        if replica.unstarted.pop(number, None) is not None:
            replica.computed_before = PromptWork(replica.load.prompt_tokens, replica.load.prompt_pairs)
            self._started[number] = self.clock()
            self._unclaim(assignment, replica.bit)

    def ended(self, number: int) -> None:
        """Record the end of a request, for whatever reason. Ignores unknown numbers."""
        answering, now = self._started.pop(number, None), self.clock()
        self.started(number)
        assignment = self._requests.pop(number, None)
        if assignment is None:
            return
        self._started.pop(number, None)
        replica = self.replicas[assignment.replica]
        replica.open -= 1
        # A request without a first token says nothing about how long answers take.
        if answering is not None:
            known = now - answering if replica.answer_seconds is None else replica.answer_seconds
            replica.answer_seconds = known + ANSWER_SHARE * (now - answering - known)

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
