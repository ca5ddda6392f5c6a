"""Bugs of the residency of models, planted from outside and caught by random worlds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.support.servers.model_world import World
from weft.server.models.residency import ModelState, Residence, Residency

SEEDS = 60
Patch = pytest.MonkeyPatch
PLANTS: list[Callable[[Patch], None]] = []


def plant(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PLANTS.append(sow)
    return sow


@plant
def a_model_expires_while_its_requests_run(patch: Patch) -> None:
    def expires(self: Residence) -> float:
        if self.state is not ModelState.LOADED or self.keep_alive_seconds is None:
            return math.inf
        return max(self.stays_until, self.used + self.keep_alive_seconds)

    patch.setattr(Residence, "expires", property(expires))


@plant
def a_model_that_is_unloading_costs_nothing(patch: Patch) -> None:
    there = (ModelState.LOADING, ModelState.LOADED)
    held = property(lambda self: sum(each.cost for each in self.models.values() if each.state in there))
    patch.setattr(Residency, "held", held)


@plant
def a_model_may_go_as_soon_as_it_is_loaded(patch: Patch) -> None:
    original = Residency.note_loaded

    def note_loaded(self: Residency, name: str) -> None:
        original(self, name)
        self.models[name].stays_until = 0.0

    patch.setattr(Residency, "note_loaded", note_loaded)


@plant
def the_newest_request_is_served_first(patch: Patch) -> None:
    newest = property(lambda self: (self.patient, -next(reversed(self.waiting)).number if self.waiting else math.inf))
    patch.setattr(Residence, "turn", newest)


@plant
def lines_of_batches_are_in_a_hurry(patch: Patch) -> None:
    patch.setattr(Residence, "patient", property(lambda self: False))


@plant
def nobody_looks_again_until_something_happens(patch: Patch) -> None:
    patch.setattr(Residency, "wakes_at", lambda self: math.inf)


@plant
def a_failed_load_is_tried_again_at_once(patch: Patch) -> None:
    def note_failed(self: Residency, name: str) -> None:
        self.models[name].state = ModelState.IDLE

    patch.setattr(Residency, "note_failed", note_failed)


@plant
def those_that_wait_are_not_counted(patch: Patch) -> None:
    patch.setattr(Residency, "waiting", property(lambda self: 0))


@plant
def a_crashed_engine_still_counts_as_loaded(patch: Patch) -> None:
    original = Residency.note_ended

    def note_ended(self: Residency, name: str) -> None:
        original(self, name)
        self.models[name].state = ModelState.LOADED

    patch.setattr(Residency, "note_ended", note_ended)


def worlds() -> None:
    for seed in range(SEEDS):
        World(seed).run(120)


def test_without_a_bug_the_worlds_are_in_order() -> None:
    worlds()


@pytest.mark.parametrize("sow", PLANTS, ids=lambda sow: sow.__name__)
def test_a_planted_bug_is_noticed(sow: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sow(monkeypatch)
    with pytest.raises(AssertionError):
        worlds()
