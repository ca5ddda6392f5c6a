"""Which models are loaded: random worlds keep the rules, and tables show each rule alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.servers.model_world import World
from weft.server.models.residency import (
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


@given(seed=st.integers(0, 1 << 40))
def test_no_busy_model_is_unloaded_the_budget_holds_and_every_request_ends(seed: int) -> None:
    World(seed).run(120)


def test_loads_are_a_quarter_of_the_time_when_two_models_compete() -> None:
    models = Machine({"a": 6, "b": 6}, budget=10, stay_seconds=0.0, wait_seconds=1e9)
    loading, began = 0.0, models.now
    for turn in range(20):
        name = "ab"[turn % 2]
        models.enter(name)
        models.pass_until(lambda name=name: models.state(name) is ModelState.LOADING)
        models.now += 5.0
        loading += 5.0
        models.load(name)
        models.finish()
    assert loading <= (models.now - began + STAY_LOADS * 5.0) / 4


class Machine:
    """A residency with its clock, whose orders are collected and whose unloads end at once."""

    def __init__(self, costs: dict[str, int], **rules: float | None) -> None:
        self.now = 100.0
        self.residency = Residency(costs, ResidencyRules(**rules), lambda: self.now)  # type: ignore[arg-type]
        self.granted: list[Ticket] = []
        self.refused: list[RefuseRequest] = []

    def state(self, name: str) -> ModelState:
        return self.residency.models[name].state

    def enter(self, name: str, patient: bool = False) -> Ticket:
        ticket = self.residency.enter(name, patient)
        self.plan()
        return ticket

    def load(self, name: str) -> None:
        self.residency.note_loaded(name)
        self.plan()

    def leave(self, ticket: Ticket) -> None:
        self.residency.leave(ticket)
        self.plan()

    def finish(self) -> None:
        for ticket in self.granted:
            self.residency.leave(ticket)
        self.granted.clear()
        self.plan()

    def plan(self) -> None:
        for order in self.residency.plan():
            match order:
                case GrantRequest(ticket):
                    self.granted.append(ticket)
                case RefuseRequest():
                    self.refused.append(order)
                case UnloadModel(name):
                    self.residency.note_unloaded(name)
                    self.plan()
                case LoadModel():
                    pass

    def pass_until(self, reached) -> None:
        for _ in range(100):
            if reached():
                return
            self.now = max(self.now, self.residency.wakes_at())
            self.plan()
        raise AssertionError("never reached")


def two(**rules: float | None) -> Machine:
    """Two models of which one fits; the first is loaded and runs a request."""
    models = Machine({"a": 6, "b": 6}, **{"budget": 10, **rules})
    models.enter("a")
    models.load("a")
    return models


def test_a_model_is_loaded_for_its_first_request_and_runs_all_that_wait() -> None:
    models = Machine({"a": 1}, budget=1)
    tickets = [models.enter("a"), models.enter("a")]
    assert models.state("a") is ModelState.LOADING
    assert not models.granted
    models.load("a")
    assert models.granted == tickets


def test_an_idle_model_makes_room_once_its_time_has_passed() -> None:
    models = two(stay_seconds=10.0)
    models.finish()
    models.enter("b")
    assert (models.state("a"), models.state("b")) == (ModelState.LOADED, ModelState.IDLE)
    assert models.residency.wakes_at() == 110.0
    models.now = 110.0
    models.plan()
    assert (models.state("a"), models.state("b")) == (ModelState.IDLE, ModelState.LOADING)


def test_a_busy_model_yields_its_new_requests_wait_and_its_running_ones_finish() -> None:
    models = two(stay_seconds=10.0)
    [running] = models.granted
    models.now = 120.0
    models.enter("b")
    late = models.enter("a")
    assert models.state("a") is ModelState.LOADED
    assert late not in models.granted
    models.leave(running)
    assert (models.state("a"), models.state("b")) == (ModelState.IDLE, ModelState.LOADING)
    models.load("b")
    models.pass_until(lambda: models.state("b") is ModelState.LOADED and not models.residency.models["b"].waiting)
    models.finish()
    models.pass_until(lambda: models.state("a") is ModelState.LOADING)


def test_a_busy_model_does_not_yield_for_a_batch_and_a_request_in_a_hurry_comes_first() -> None:
    models = two(stay_seconds=10.0)
    models.now = 120.0
    models.enter("b", patient=True)
    assert models.enter("a") in models.granted
    models.finish()
    assert (models.state("a"), models.state("b")) == (ModelState.IDLE, ModelState.LOADING)
    three = Machine({"a": 6, "b": 6, "c": 6}, budget=10, stay_seconds=10.0)
    three.enter("a")
    three.load("a")
    three.enter("b", patient=True)
    three.enter("c")
    three.finish()
    three.pass_until(lambda: three.state("a") is ModelState.IDLE)
    assert (three.state("b"), three.state("c")) == (ModelState.IDLE, ModelState.LOADING)


def test_requests_that_waited_run_when_the_one_that_wanted_the_room_gives_up() -> None:
    models = two(stay_seconds=10.0)
    models.now = 120.0
    wants = models.enter("b")
    late = models.enter("a")
    models.leave(wants)
    assert late in models.granted


def test_the_model_used_longest_ago_goes_first_and_no_more_than_needed() -> None:
    models = Machine({"a": 4, "b": 4, "c": 4}, budget=8, stay_seconds=0.0)
    for name in "ab":
        models.enter(name)
        models.load(name)
        models.finish()
        models.now += 1
    models.enter("c")
    assert [models.state(name) for name in "abc"] == [ModelState.IDLE, ModelState.LOADED, ModelState.LOADING]


@pytest.mark.parametrize(("keep_alive", "unloaded"), [(30.0, 130.0), (0.0, 110.0), (None, None)])
def test_a_model_without_requests_is_unloaded_after_its_keep_alive(keep_alive, unloaded) -> None:
    models = two(stay_seconds=10.0, keep_alive_seconds=keep_alive)
    models.finish()
    if unloaded is None:
        assert models.residency.wakes_at() > 1e12 or models.residency.models["a"].expires > 1e12
        return
    models.now = unloaded - 0.5
    models.plan()
    assert models.state("a") is ModelState.LOADED
    models.now = unloaded
    models.plan()
    assert models.state("a") is ModelState.IDLE


def test_a_hint_never_unloads_a_model_with_requests() -> None:
    models = two(stay_seconds=0.0, keep_alive_seconds=300.0)
    models.residency.hint("a", 0.0)
    models.now += 1000.0
    models.plan()
    assert models.state("a") is ModelState.LOADED
    models.finish()
    assert models.state("a") is ModelState.IDLE
    # The hint was for that load.
    assert models.residency.models["a"].keep_alive_seconds == 300.0


def test_only_force_unloads_a_model_with_requests() -> None:
    models = two(stay_seconds=1000.0)
    with pytest.raises(Busy, match=r"has 1 running and 0 waiting requests; pass force: true"):
        models.residency.order_unload("a", force=False)
    models.residency.order_unload("a", force=True)
    models.plan()
    assert models.state("a") is ModelState.IDLE


def test_a_failed_load_refuses_who_waits_and_is_tried_again_later_and_later() -> None:
    models, pauses = Machine({"a": 1}, budget=1), []
    for _ in range(7):
        models.enter("a")
        models.residency.note_failed("a")
        models.plan()
        pauses.append(models.refused[-1].retry_seconds)
        # Others are refused at once meanwhile.
        models.enter("a")
        assert models.refused[-1].reason == "model 'a' cannot be loaded; the server's log says why"
        models.now += pauses[-1]
    assert pauses == [2, 4, 8, 16, 32, 60, 60]


def test_an_engine_that_ends_at_once_counts_as_a_failed_load() -> None:
    models = two(stay_seconds=10.0)
    models.residency.note_ended("a")
    models.enter("a")
    assert models.refused
    models.now += 2.0
    models.enter("a")
    assert models.state("a") is ModelState.LOADING


def test_a_request_waits_for_a_bounded_time() -> None:
    models = two(wait_seconds=60.0)
    models.enter("b")
    models.pass_until(lambda: bool(models.refused))
    assert models.now == 160.0
    assert models.refused[0].reason == "model 'b' was not loaded in 60 s; try again later"


def test_the_number_of_waiting_requests_is_bounded() -> None:
    models = two(waiting=2)
    models.enter("b")
    models.enter("b")
    with pytest.raises(NoRoom):
        models.enter("b")
    # A loaded model takes requests all the same.
    assert models.enter("a") in models.granted
