"""Several simulated engines on one clock, and the router that chooses between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet import comparison
from weft.base.errors import InvalidOption
from weft.cli.main import main
from weft.cli.simulate import SimulateOptions
from weft.simulate import routing
from weft.simulate.costs import cost_model
from weft.simulate.found import Found
from weft.simulate.routing import Mirrored
from weft.simulate.sessions import SimulatedSession
from weft.simulate.setup import SimulationSetup, Traffic, run, simulation
from weft.simulate.stepping import Simulated
from weft.simulate.text import Text, simulated_request

GIB = 1 << 30


def setup(name: str = "tools", requests: int = 120, replicas: int = 4, **settings: object) -> SimulationSetup:
    return SimulationSetup(
        Traffic(name, requests), cost_model("qwen3-next-mini"), 16 * GIB, replicas=replicas, **settings
    )


@pytest.fixture(scope="module")
def by_router() -> dict[str, Found]:
    return {name: run(setup(router=name, oracle=True)) for name in routing.ROUTERS}


def test_every_router_serves_all_requests_and_the_sums_are_those_of_the_replicas(by_router):
    assert len({found.requests for found in by_router.values()}) == 1
    for found in by_router.values():
        assert len(found.replicas) == 4
        assert not found.failed
        assert not found.refused
        assert found.requests == sum(each.requests for each in found.replicas) == len(found.first_token_seconds)
        assert found.hit_tokens == sum(each.hit_tokens for each in found.replicas) <= found.oracle_tokens
        assert found.stats["lookups"] == sum(each.stats["lookups"] for each in found.replicas)
        assert found.imbalance >= 1.0


def test_a_router_that_knows_states_reuses_much_more_than_round_robin(by_router):
    assert by_router["state"].hit_tokens > 1.15 * by_router["round-robin"].hit_tokens
    assert by_router["state"].first_token(0.5) < by_router["round-robin"].first_token(0.5)


def test_replicas_share_the_memory_equally():
    target = simulation(setup(replicas=4), 16 * GIB, 0.0)
    assert [engine.config.memory_bytes for engine in target.engines] == [4 * GIB] * 4
    assert simulation(setup(replicas=1), 16 * GIB, 0.0).engines[0].config.memory_bytes == 16 * GIB


def test_the_same_traffic_gives_the_same_routes():
    first, second = (run(setup(requests=60, router="state")) for _ in range(2))
    assert first.first_token_seconds == second.first_token_seconds
    assert [each.requests for each in first.replicas] == [each.requests for each in second.replicas]


def one_after_the_other(requests: int) -> list[SimulatedSession]:
    """Conversations of three turns, each request long after the last one has ended."""
    texts, sessions = [Text(64, [(7, 500), (100 + each, 700)]) for each in range(5)], []
    for number in range(requests):
        text = texts[number % 5]
        if number >= 5:
            text.append(1000 + number, 90)
        ask = simulated_request(text, 5000 + number, 40)
        sessions.append(SimulatedSession(1000.0 * number, iter([(0.0, ask)])))
    return sessions


@pytest.mark.parametrize("model", ["qwen3-next-mini", "gemma-3-12b"])
def test_the_tokens_that_the_router_promises_are_those_that_the_engine_finds(model, monkeypatch):
    promised: dict[int, int] = {}
    found: dict[int, int] = {}

    class Promising(Mirrored):
        def choose(self, sequence: Simulated, now: float) -> int:
            place = super().choose(sequence, now)
            promised[sequence.id] = self.last.saved
            return place

    monkeypatch.setitem(routing.ROUTERS, "state", Promising)
    target = simulation(
        replace(setup(router="state"), cost=cost_model(model)),
        64 * GIB,
        0.0,
        lambda each: found.update({each.id: each.miss.cached}),
        iter(one_after_the_other(15)),
    )
    target.run()
    assert promised == found
    assert sum(list(found.values())[5:]) > 5000


def test_a_router_without_replicas_is_refused_by_name():
    with pytest.raises(InvalidOption, match="replicas"):
        SimulateOptions(router=("state",))
    with pytest.raises(InvalidOption, match="round-robin, hash, prefix, state"):
        SimulateOptions(router=("random",), replicas=2)


def test_the_command_compares_routers_in_one_table(capsys):
    given = [
        "--requests",
        "60",
        "--memory",
        "4GiB",
        "--replicas",
        "2",
        "--router",
        "state",
        "--router",
        "hash",
        "--no-progress",
    ]
    assert main(["simulate", "--workload", "tools", *given]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["state", "hash"]
    assert "Busiest replica / average" in table


def test_routers_are_compared_speed_by_speed():
    medians = {"a/b": 0.0, "a/b/prefix": 2.0, "a/b/state": 1.0, "a/b/prefix@0.98": 1.0, "a/b/state@0.98": 1.5}
    results = {name: {"p50": p50} for name, p50 in medians.items()}
    results["a/b/prefix@1.02"] = {"p50": 1.0}
    assert comparison(results, ("prefix", "state")).splitlines()[2] == "| a, b | 1.000 | 0.500 | 1 of 2 |"
