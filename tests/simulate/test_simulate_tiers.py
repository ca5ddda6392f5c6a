"""The simulator with tiers: the engine's own code below the device, and copies that take the time that they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models.engines import model_of, smallest_memory, spec_of
from tests.support.simulated import conversations, cost_of, on_engine, waves
from tests.support.simulated_tiers import check_turns
from weft.base.config import EngineConfig
from weft.cli.main import main
from weft.engine.loop import Engine
from weft.memory.audit import audit
from weft.memory.misses import Reason
from weft.runner.runner import Runner
from weft.simulate.costs import TierRates, cost_model
from weft.simulate.found import Found
from weft.simulate.sessions import SimulatedSession
from weft.simulate.setup import SimulationSetup, Traffic, run
from weft.simulate.simulation import Simulation
from weft.simulate.stepping import Simulated


@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_a_real_engine_with_host_memory_hits_exactly_what_the_simulator_predicts(family: str) -> None:
    spec, plan = spec_of(family), conversations(waves(3))
    settings = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640}
    memory = smallest_memory(family, 640) * 5 // 4
    config = EngineConfig(memory_bytes=memory, host_bytes=8 << 20, **settings)
    runner = Runner(model_of(family), spec, memory, config.max_sequences, threads=1)
    runner.tiers.add_host_memory(config.host_bytes)
    engine = Engine(spec, runner, config)
    assert engine.ledger.tiers is not None
    link = engine.ledger.tiers.links[0]
    # Whether a load pays on this machine is another matter.
    link.rates.load_bytes, link.rates.loaded = 1e18, lambda size, seconds: None
    hits = on_engine(engine, plan)
    assert link.loaded_tokens > 0
    found: dict[int, int] = {}
    sessions = [SimulatedSession(1000.0 * n, iter([(0.0, each)])) for n, wave in enumerate(plan) for each in wave]
    fast = replace(cost_of(spec), tiers=TierRates(1e18, 1e18, 1e18))
    target = Simulation(fast, config, iter(sessions), 1, tell=lambda s: found.update({s.id: s.miss.cached}))
    target.run()
    audit(target.engines[0].ledger)
    assert hits == [found[number] for number in sorted(found)]


def simulated(rates: TierRates, seen: list[Simulated] | None = None, **sizes: float) -> Found:
    cost = replace(cost_model("nemotron-nano-9b-v2"), tiers=rates)
    tell = None if seen is None else seen.append
    return run(SimulationSetup(Traffic("sharegpt", 150), cost, 0.05, oracle=True, **sizes), tell)


@pytest.mark.thorough
def test_each_tier_adds_hits_and_a_share_of_what_it_cost_to_get_them() -> None:
    alone = simulated(TierRates())
    host = simulated(TierRates(), host_memory=0.1)
    both = simulated(TierRates(), host_memory=0.1, disk=2.0)
    assert 1.2 * alone.hit_tokens < host.hit_tokens < both.hit_tokens
    assert alone.first_token(0.5) > both.first_token(0.5)
    assert both.oracle_tokens is not None
    assert both.hit_tokens > 0.75 * both.oracle_tokens
    assert "tiers" not in alone.stats
    assert set(both.stats["tiers"]) == {"host", "disk"}
    assert both.stats["tiers"]["disk"]["loaded_tokens"] > 0


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    slow = simulated(TierRates(disk_read=3e7), disk=1.0)
    quick = simulated(TierRates(), disk=1.0)
    # How slow it is, the first loads show.
    loaded = [each.stats["tiers"]["disk"]["loaded_tokens"] for each in (slow, quick)]
    assert 10 * loaded[0] < loaded[1]
    assert slow.stats["misses"][Reason.LOAD_SLOWER] > 0


def test_a_request_starts_after_its_load_has_landed() -> None:
    # A gigabyte takes half a second: less than to compute it, and much longer than a step.
    seen: list[Simulated] = []
    found = simulated(TierRates(host=2e9), seen, host_memory=1.0)
    loaded = [each for each in seen if each.report.loaded_tokens and each.first_seconds is not None]
    assert len(loaded) > 5
    page = cost_model("nemotron-nano-9b-v2").kv_bytes_per_token
    for each in loaded:
        waited = each.first_seconds - each.arrived_seconds
        # Pages that were on the device already are not loaded.
        assert waited > (each.report.loaded_tokens - each.report.cached_tokens) * page / 2e9
    state = cost_model("nemotron-nano-9b-v2").spec.state_bytes
    assert min(each.first_seconds - each.arrived_seconds for each in loaded) > state / 2e9
    assert found.failed == 0


@pytest.mark.parametrize(("conversations", "memory", "host"), [(24, 3 << 30, 7 << 30), (40, 4 << 30, 11 << 30)])
def test_of_conversations_that_take_turns_host_memory_keeps_the_last_points(
    conversations: int, memory: int, host: int
) -> None:
    check_turns(conversations, memory, host)


def test_the_command_has_tiers_with_sizes_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", "sharegpt", "--requests", "60", "--memory", "20%", "--no-progress"]
    arguments += ["--model", "nemotron-nano-9b-v2", "--json", str(tmp_path / "out.json")]
    tiers = ["--host-memory", "20%", "--disk-size", "40GiB", "--host-rate", "20", "--disk-read-rate", "1"]
    assert main([*arguments, *tiers]) == 0
    assert "Tokens loaded from disk" in capsys.readouterr().out
    (only,) = json.loads((tmp_path / "out.json").read_text())["runs"].values()
    assert set(only["tiers"]) == {"host", "disk"}
    assert only["stats"]["tiers"]["disk"]["limit_bytes"] > 39 << 30
    assert main([*arguments, "--host-memory", "much"]) == 2
    assert main([*arguments, "--disk-read-rate", "0"]) == 2
