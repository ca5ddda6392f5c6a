"""Which models are loaded: a state machine without processes and without a clock of its own.

    IDLE -> LOADING -> LOADED -> UNLOADING -> IDLE

Requests enter and leave; engines report that they were loaded, failed or ended. `plan` returns what must happen next:
loads, unloads, and the requests that may run or are refused. The rules:

- What is loading, loaded or unloading costs at most the budget.
- Models are loaded in the order of their oldest waiting request, and none overtakes.
- A model with running requests is never unloaded, except by an admin.
- A model that was loaded stays for a while, three times as long as its load took. So at most a quarter of the time goes
  into loading. If it is still busy then, and its memory is needed, new requests for it wait while running ones finish.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# A model that cannot be loaded is tried again after this time, which doubles up to the most.
RETRY_SECONDS, MOST_RETRY_SECONDS = 2.0, 60.0
# A model stays loaded for this multiple of the time that its load took.
STAY_LOADS = 3.0


class ModelState(StrEnum):
    IDLE = "idle"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyRules:
    """`keep_alive_seconds` without requests, after which a model is unloaded; None: never for that."""

    budget: int
    keep_alive_seconds: float | None = 300.0
    stay_seconds: float = 10.0  # the least time that a model stays loaded
    wait_seconds: float = 300.0  # that a request waits for its model
    waiting: int = 256  # requests that wait, for all models


@dataclass(slots=True, eq=False)
class Ticket:
    """A request for a model: it waits until it is granted, and then runs until it leaves.

    `patient`: it comes after all that are not, and no busy model yields for it.
    """

    model: str
    since: float
    number: int  # in the order of all requests
    patient: bool = False


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Start a model's engine."""

    model: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """End a model's engine. `force`: its running requests are ended."""

    model: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Let a request run, whose model is loaded."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """End a request that has waited in vain; it may come again after `retry_seconds`."""

    ticket: Ticket
    reason: str
    retry_seconds: int


Order = LoadModel | UnloadModel | GrantRequest | RefuseRequest


class NoRoom(Exception):
    """Too many requests wait already. `retry_seconds` is when another may come."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__("too many requests wait for a model to be loaded")
        self.retry_seconds = retry_seconds


class Busy(Exception):
    """A model cannot be unloaded now; the message says why."""


@dataclass(slots=True)
class Residence:
    """One model. Requests that run and wait; times are those of the machine's clock."""

    name: str
    cost: int
    state: ModelState = ModelState.IDLE
    running: set[Ticket] = field(default_factory=set)
    waiting: dict[Ticket, None] = field(default_factory=dict)
    keep_alive_seconds: float | None = None
    loads: int = 0
    unloads: int = 0
    failed_loads: int = 0
    crashes: int = 0
    began: float = 0.0
    loaded: float = 0.0
    stays_until: float = 0.0
    used: float = 0.0
    failures: int = 0
    retry: float = 0.0
    # Its memory is needed, so no further request may run.
    yields: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def oldest(self) -> float:
        """When the request came that waits longest."""
        return next(iter(self.waiting)).since if self.waiting else math.inf

    @property
    def patient(self) -> bool:
        """Whether only patient requests wait."""
        return all(each.patient for each in self.waiting)

    @property
    def turn(self) -> tuple[bool, float]:
        """What orders models that wait to be loaded: the number of the oldest request, behind those in a hurry."""
        numbers = (each.number for each in self.waiting if each.patient == self.patient)
        return self.patient, min(numbers, default=math.inf)

    @property
    def expires(self) -> float:
        """When the model is unloaded if no request comes."""
        if self.state is not ModelState.LOADED or self.busy or self.keep_alive_seconds is None:
            return math.inf
        return max(self.stays_until, self.used + self.keep_alive_seconds)


class Residency:
    """All models by name, with what each costs of the budget; `clock` is the time."""

    def __init__(self, costs: Mapping[str, int], rules: ResidencyRules, clock: Callable[[], float]) -> None:
        assert all(cost <= rules.budget for cost in costs.values())
        self.rules = rules
        self._clock = clock
        self.models = {
            name: Residence(name, cost, keep_alive_seconds=rules.keep_alive_seconds) for name, cost in costs.items()
        }
        self._numbers = itertools.count()
        # Decided between two plans.
        self._ordered: list[Order] = []

    @property
    def held(self) -> int:
        """What all models that are not idle cost together."""
        return sum(each.cost for each in self.models.values() if each.state is not ModelState.IDLE)

    @property
    def waiting(self) -> int:
        return sum(len(each.waiting) for each in self.models.values())

    # requests ---------------------------------------------------------------------------------------------------------

    def enter(self, name: str, patient: bool = False) -> Ticket:
        """Let a request wait for its model. Raises `NoRoom` if too many do."""
        model, now = self.models[name], self._clock()
        ticket = Ticket(name, now, next(self._numbers), patient)
        if self.waiting >= self.rules.waiting and not self._is_open(model):
            raise NoRoom(self._retry_seconds(now))
        model.waiting[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Let a request go: it has ended, or waits no longer."""
        model = self.models[ticket.model]
        model.waiting.pop(ticket, None)
        if ticket in model.running:
            model.running.remove(ticket)
            model.used = self._clock()

    def hint(self, name: str, seconds: float | None) -> None:
        """Keep a model for this long after its last request; None: for ever. It changes when, not whether it may go."""
        self.models[name].keep_alive_seconds = seconds

    def order_unload(self, name: str, force: bool) -> None:
        """Unload a model on an admin's order: without `force` only if no request runs or waits."""
        model = self.models[name]
        if model.state is ModelState.LOADING:
            raise Busy("is loading; try again when it is loaded")
        if model.busy and not force:
            counts = f"{len(model.running)} running and {len(model.waiting)} waiting requests"
            raise Busy(f"has {counts}; pass force: true to end them")
        if model.state is ModelState.LOADED:
            self._ordered.append(self._unload(model, force))

    # engines ----------------------------------------------------------------------------------------------------------

    def note_loaded(self, name: str) -> None:
        model, now = self.models[name], self._clock()
        assert model.state is ModelState.LOADING
        model.state, model.loads = ModelState.LOADED, model.loads + 1
        model.loaded = model.used = now
        model.stays_until = now + max(self.rules.stay_seconds, STAY_LOADS * (now - model.began))
        # It was loaded for them: they run before it may make room for others.
        self._ordered += self._granted(model)

    def note_failed(self, name: str) -> None:
        """A load has failed, and its process has ended."""
        model = self.models[name]
        assert model.state is ModelState.LOADING
        model.state, model.failed_loads = ModelState.IDLE, model.failed_loads + 1
        self._wait_for_retry(model)

    def note_ended(self, name: str) -> None:
        """An engine has ended on its own, with the requests that ran."""
        model = self.models[name]
        assert model.state is ModelState.LOADED
        model.state, model.crashes = ModelState.IDLE, model.crashes + 1
        model.running.clear()
        if self._clock() < model.stays_until:
            self._wait_for_retry(model)
        else:
            model.failures = 0

    def note_unloaded(self, name: str) -> None:
        model = self.models[name]
        assert model.state is ModelState.UNLOADING
        model.state, model.failures, model.unloads = ModelState.IDLE, 0, model.unloads + 1
        model.running.clear()
        model.keep_alive_seconds = self.rules.keep_alive_seconds

    def _wait_for_retry(self, model: Residence) -> None:
        pause = min(MOST_RETRY_SECONDS, RETRY_SECONDS * 2**model.failures)
        model.failures, model.retry = min(model.failures + 1, 16), self._clock() + pause

    # planning ---------------------------------------------------------------------------------------------------------

    def plan(self) -> list[Order]:
        """Return what must happen now; the states have changed accordingly."""
        now = self._clock()
        orders: list[Order] = [*self._ordered, *self._refused(now), *self._make_room(now)]
        self._ordered.clear()
        for model in self.models.values():
            if model.expires <= now:
                orders.append(self._unload(model))
            if self._is_open(model):
                orders += self._granted(model)
        return orders

    def wakes_at(self) -> float:
        """Return the next time at which `plan` may return something though nothing else has happened."""
        times = [math.inf]
        for model in self.models.values():
            if model.state is ModelState.LOADED:
                times += [model.expires, *([model.stays_until] if model.stays_until > self._clock() else [])]
            times.append(model.oldest + self.rules.wait_seconds)
        return min(times)

    def _is_open(self, model: Residence) -> bool:
        return model.state is ModelState.LOADED and not model.yields

    def _granted(self, model: Residence) -> list[Order]:
        granted = list(model.waiting)
        model.waiting.clear()
        model.running.update(granted)
        return [GrantRequest(ticket) for ticket in granted]

    def _refused(self, now: float) -> Iterator[Order]:
        """Refuse requests that have waited too long, and those for models that failed a moment ago."""
        for model in self.models.values():
            failed = model.state is ModelState.IDLE and model.retry > now
            for ticket in list(model.waiting):
                late = now >= ticket.since + self.rules.wait_seconds
                if not failed and not late:
                    break
                del model.waiting[ticket]
                if failed:
                    reason = f"model {model.name!r} cannot be loaded; the server's log says why"
                    yield RefuseRequest(ticket, reason, math.ceil(model.retry - now))
                else:
                    reason = f"model {model.name!r} was not loaded in {self.rules.wait_seconds:g} s; try again later"
                    yield RefuseRequest(ticket, reason, self._retry_seconds(now))

    def _make_room(self, now: float) -> Iterator[Order]:
        """Load the models that are waited for, in turn; unload others for the first one that does not fit."""
        for model in self.models.values():
            model.yields = False
        wanted = [each for each in self.models.values() if each.state is ModelState.IDLE and each.waiting]
        for model in sorted(wanted, key=lambda each: each.turn):
            missing = self.held + model.cost - self.rules.budget
            if missing <= 0:
                model.state, model.began = ModelState.LOADING, now
                yield LoadModel(model.name)
                continue
            leaving = sum(each.cost for each in self.models.values() if each.state is ModelState.UNLOADING)
            yield from self._evict(missing - leaving, now, spares_busy=model.patient)
            return

    def _evict(self, missing: int, now: float, spares_busy: bool) -> Iterator[Order]:
        """Unload models until enough is free: those without requests first, then the ones loaded longest ago."""
        loaded = [each for each in self.models.values() if each.state is ModelState.LOADED]
        if spares_busy:
            loaded = [each for each in loaded if not each.busy]
        for model in sorted(loaded, key=lambda each: (each.busy, each.loaded if each.busy else each.used)):
            if missing <= 0:
                return
            missing -= model.cost
            if now < model.stays_until:
                continue
            model.yields = True
            if not model.running:
                yield self._unload(model)

    def _unload(self, model: Residence, force: bool = False) -> UnloadModel:
        model.state, model.yields = ModelState.UNLOADING, False
        return UnloadModel(model.name, force)

    def _retry_seconds(self, now: float) -> int:
        """Return when a request that was refused may succeed: when the next model may leave."""
        stays = [each.stays_until - now for each in self.models.values() if each.state is ModelState.LOADED]
        return max(1, math.ceil(min(stays, default=1.0)))
