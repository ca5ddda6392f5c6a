"""A world for a residency: requests, engines that load, fail and crash, and a clock, all drawn from one seed.

It plans only when the real driver would: after an event, and at the time that the residency names. It checks after
every plan what must always hold, and at the end that every request has run or was refused.
"""

from __future__ import annotations

import math
import random

from weft.server.models.residency import (
    RETRY_SECONDS,
    STAY_LOADS,
    Busy,
    GrantRequest,
    LoadModel,
    ModelState,
    NoRoom,
    RefuseRequest,
    Residency,
    ResidencyRules,
    Ticket,
    UnloadModel,
)

# Times are sums of binary fractions, so that none is rounded.
TICK = 0.25


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        count = self.random.randint(2, 4)
        self.costs = {f"m{place}": self.random.randint(1, 6) for place in range(count)}
        budget = max(*self.costs.values(), self.random.randint(1, sum(self.costs.values())))
        self.rules = ResidencyRules(
            budget=budget,
            keep_alive_seconds=self.random.choice([None, 0.0, 2.0, 30.0]),
            stay_seconds=self.random.choice([0.0, 1.0, 10.0]),
            wait_seconds=self.random.choice([5.0, 60.0]),
            waiting=self.random.choice([2, 8]),
        )
        self.residency = Residency(self.costs, self.rules, lambda: self.now)
        self.waiting: set[Ticket] = set()
        self.running: set[Ticket] = set()
        self.ended: set[Ticket] = set()
        # By model: when its load began, when it was loaded, how long that took, when its last load failed.
        self.loading: dict[str, float] = {}
        self.loaded: dict[str, tuple[float, float]] = {}
        self.unloading: set[str] = set()
        self.failed: dict[str, float] = {}
        self.loads = 0

    # events -----------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        acts = (self.enter, self.enter, self.leave, self.give_up, self.finish_load, self.finish_unload, self.crash)
        acts += (self.hint, self.order, self.wait, self.wait, self.finish_load, self.finish_unload)
        for _ in range(steps):
            self.random.choice(acts)()
            self.plan()
        self.drain()

    def enter(self) -> None:
        name = self.random.choice([*self.costs])
        try:
            ticket = self.residency.enter(name, patient=self.random.random() < 0.3)
        except NoRoom:
            return
        self.waiting.add(ticket)
        closed = [each for each in self.waiting if each.model not in self.loaded]
        assert len(closed) <= self.rules.waiting, "too many requests wait"

    def leave(self) -> None:
        self._go(self.running)

    def give_up(self) -> None:
        self._go(self.waiting)

    def _go(self, tickets: set[Ticket]) -> None:
        if tickets:
            ticket = self.random.choice(sorted(tickets, key=lambda each: each.number))
            tickets.remove(ticket)
            self.ended.add(ticket)
            self.residency.leave(ticket)

    def finish_load(self, fails: float = 0.2) -> None:
        if self.loading:
            name = self.random.choice(sorted(self.loading))
            began = self.loading.pop(name)
            if self.random.random() < fails:
                self.failed[name] = self.now
                self.residency.note_failed(name)
            else:
                self.loaded[name] = (self.now, self.now - began)
                self.residency.note_loaded(name)

    def finish_unload(self) -> None:
        if self.unloading:
            name = self.random.choice(sorted(self.unloading))
            self.unloading.remove(name)
            self.residency.note_unloaded(name)

    def crash(self) -> None:
        if self.loaded and self.random.random() < 0.2:
            name = self.random.choice(sorted(self.loaded))
            del self.loaded[name]
            self.residency.note_ended(name)
            self._end_running(name)

    def _end_running(self, name: str) -> None:
        """The engine answers its requests with an error, and they leave."""
        for ticket in [each for each in self.running if each.model == name]:
            self.running.remove(ticket)
            self.ended.add(ticket)
            self.residency.leave(ticket)

    def hint(self) -> None:
        self.residency.hint(self.random.choice([*self.costs]), self.random.choice([None, 0.0, 1.0, 20.0]))

    def order(self) -> None:
        name, force = self.random.choice([*self.costs]), self.random.random() < 0.3
        try:
            self.residency.order_unload(name, force)
        except Busy:
            return
        for order in self.residency.plan():
            self._take(order, ordered=name, force=force)
        self.check()

    def wait(self) -> None:
        """Let time pass, but not past a moment at which the residency wants to plan."""
        self.now = min(self.now + TICK * self.random.randint(1, 40), max(self.now, self.residency.wakes_at()))

    # orders -----------------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        for order in self.residency.plan():
            self._take(order)
        self.check()

    def _take(self, order: object, ordered: str | None = None, force: bool = False) -> None:
        match order:
            case LoadModel(name):
                self._load(name)
            case UnloadModel(name):
                assert name in self.loaded, "a model was unloaded that is not loaded"
                since, took = self.loaded.pop(name)
                if name != ordered:
                    least = since + max(self.rules.stay_seconds, STAY_LOADS * took)
                    assert self.now >= least, "a model was unloaded before its time"
                if not force:
                    assert not any(each.model == name for each in self.running), "a busy model was unloaded"
                self.unloading.add(name)
                self._end_running(name)
            case GrantRequest(ticket):
                assert ticket.model in self.loaded, "a request runs on a model that is not loaded"
                self.waiting.remove(ticket)
                self.running.add(ticket)
            case RefuseRequest(ticket, _, retry_seconds):
                assert retry_seconds >= 1
                self.waiting.remove(ticket)
                self.ended.add(ticket)

    def _load(self, name: str) -> None:
        if name in self.failed:
            assert self.now >= self.failed.pop(name) + RETRY_SECONDS, "a load was tried again at once"
        first = {each: self._first(each) for each in self.costs}
        idle = [each for each in self.costs if each not in {*self.loading, *self.loaded, *self.unloading}]
        behind = [each for each in idle if first[each] < first[name] and self._may_load(each)]
        assert not behind, "a model was loaded before one that is waited for longer"
        self.loading[name] = self.now
        self.loads += 1

    def _first(self, name: str) -> tuple[bool, float]:
        """The oldest request for a model, behind those of others that are in a hurry."""
        found = [(each.patient, each.number) for each in self.waiting if each.model == name]
        return min(found, default=(True, math.inf))

    def _may_load(self, name: str) -> bool:
        return self.now >= self.failed.get(name, -math.inf) + RETRY_SECONDS * 64

    def check(self) -> None:
        there = [*self.loading, *self.loaded, *self.unloading]
        assert sum(self.costs[each] for each in there) <= self.rules.budget, "the models exceed the budget"
        if any(each.model in self.loaded for each in self.waiting):
            hurried = [each for each in self.waiting if not each.patient and each.model not in self.loaded]
            assert hurried, "a request waits for a line of a batch"
        states = {name: each.state for name, each in self.residency.models.items()}
        assert {name for name, state in states.items() if state is not ModelState.IDLE} == set(there)

    def drain(self) -> None:
        """Let everything end: loads succeed, requests leave, time passes from one planned moment to the next."""
        for _ in range(400):
            if not self.waiting and not self.running:
                return
            while self.loading:
                self.finish_load(fails=0)
                self.plan()
            while self.unloading:
                self.finish_unload()
                self.plan()
            while self.running:
                self.leave()
                self.plan()
            at = self.residency.wakes_at()
            if self.waiting and not self.loading and not self.unloading:
                assert at < math.inf, "requests wait for nothing"
                self.now = max(self.now, at)
            self.plan()
        raise AssertionError("requests wait for ever")
