"""The simulator: names of cells, arrivals, what it predicts of a real engine, and the goals that caching must meet."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from random import Random

import pytest

from tests.support.models.engines import make_engine, spec_of
from tests.support.simulated import conversations, cost_of, on_engine, waves
from weft.base.config import EngineConfig
from weft.base.errors import OptionError
from weft.cli.main import main
from weft.cli.simulate import EVICTIONS, KINDS, REASONS, ROUTERS, read_memory
from weft.memory.audit import audit
from weft.memory.captures import CaptureReasons
from weft.memory.eviction import POLICIES
from weft.memory.keys import PrefixIdentity
from weft.models import configurations
from weft.models.finding import find_checkpoint
from weft.models.shapes import shape_of
from weft.simulate import routing
from weft.simulate.costs import DeviceRates, Work, calibrated, cost_model
from weft.simulate.found import Found, Refusals
from weft.simulate.oracle import Oracle, survey
from weft.simulate.report import not_served
from weft.simulate.sessions import Arrivals, SimulatedSession
from weft.simulate.setup import SimulationSetup, Traffic, bootstrap_alpha, run, simulation
from weft.simulate.simulation import Simulation
from weft.simulate.text import SimulatedRequest, Text, simulated_request, tokens
from weft.simulate.traces import read_trace
from weft.simulate.workloads import WORKLOADS, Draw

# names ----------------------------------------------------------------------------------------------------------------


def test_texts_share_names_exactly_where_their_tokens_are_the_same():
    """Against the engine's own keys, over random texts made of few stretches."""
    random = Random(1)
    seen: dict[bytes, bytes] = {}
    for _ in range(200):
        stretches = [(random.randrange(4), random.randint(1, 100)) for _ in range(random.randint(1, 6))]
        text = Text(64, stretches)
        keys = PrefixIdentity(64).keys(tokens(stretches, 1000))
        assert len(text.keys) == len(keys) == text.length // 64
        for ours, theirs in zip(text.keys, keys, strict=True):
            assert seen.setdefault(theirs, ours) == ours
    assert len(set(seen.values())) == len(seen)


def test_a_fork_goes_its_own_way():
    stem = Text(64, [(1, 100)])
    fork = stem.fork()
    stem.append(2, 100)
    fork.append(3, 100)
    assert stem.keys[0] == fork.keys[0]
    assert stem.keys[1] != fork.keys[1]


def test_the_next_turn_comes_after_the_answer():
    asks = [SimulatedRequest([], 1, 1), SimulatedRequest([], 2, 1)]
    arrivals = Arrivals(
        iter([SimulatedSession(1.0, iter([(0.0, asks[0]), (5.0, asks[1])])), SimulatedSession(2.0, iter([]))])
    )
    assert arrivals.next_time() == 1.0
    _, first, session = arrivals.pop()
    assert first is asks[0]
    assert arrivals.next_time() is None
    arrivals.go_on(session, now=10.0)
    assert arrivals.next_time() == 15.0


# traces ---------------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_its_blocks_say(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 0, "hash_ids": [0, 1, 3]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(file, 64, speed=2.0)
    assert second.start == 1.5
    (_, one), (_, other) = next(first.turns), next(second.turns)
    assert [a == b for a, b in zip(one.keys, other.keys)] == [True] * 16 + [False]
    assert (one.prompt, one.answer, other.answer) == (1100, 10, 1)


def test_a_part_of_a_compressed_trace_is_that_part_of_the_trace(tmp_path):
    lines = [
        {"timestamp": 1000 * number, "input_length": 512, "output_length": 3, "hash_ids": [number]}
        for number in range(5)
    ]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "trace.jsonl").write_text(text)
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    whole = [(s.start, next(s.turns)) for s in read_trace(tmp_path / "trace.jsonl", 64)]
    part = [(s.start, next(s.turns)) for s in read_trace(tmp_path / "trace.jsonl.gz", 64, limit=2, skip=2)]
    assert part == [(start - 2.0, turn) for start, turn in whole[2:4]]
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-9])
    with pytest.raises(OptionError, match="cannot read"):
        list(read_trace(tmp_path / "trace.jsonl.gz", 64))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "has no timestamp"),
        ("{", "not a JSON object"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "need 2 blocks, got 1"),
    ],
)
def test_a_bad_trace_is_told_by_its_line(tmp_path, text, complaint):
    file = tmp_path / "trace.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(OptionError, match=rf"line 1.*{complaint}|{complaint}"):
        list(read_trace(file, 64))
    with pytest.raises(OptionError, match="cannot read"):
        list(read_trace(tmp_path / "absent", 64))


# workloads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_follows_from_its_seed_and_has_about_as_many_requests_as_asked(name):
    def drawn(seed):
        return [(s.start, [(d, a) for d, a in s.turns]) for s in WORKLOADS[name](Draw(600, seed=seed))]

    first = drawn(1)
    assert first == drawn(1)
    assert first != drawn(2)
    assert [start for start, _ in first] == sorted(start for start, _ in first)
    assert 200 <= sum(len(turns) for _, turns in first) <= 1200
    found = survey(WORKLOADS[name](Draw(600)), 64)
    share = found.oracle_tokens / found.prompt_tokens
    assert (share == 0) if name == "unique" else (share > 0.3)


def test_the_oracle_counts_full_cells_and_never_the_last_token():
    oracle = Oracle(64)
    text = Text(64, [(1, 128)])
    request = simulated_request(text, 2, 65)
    assert oracle.look(request) == 0
    # The same prompt again: of its two full cells one token must be computed. Its answer's last token never was.
    assert oracle.look(request) == 64
    text.append(3, 10)
    assert oracle.look(simulated_request(text, 4, 1)) == 192


# ties to reality ------------------------------------------------------------------------------------------------------


def predicted(spec, config: EngineConfig, plan: list[list[SimulatedRequest]], stride: int) -> list[int]:
    sessions = [SimulatedSession(1000.0 * n, iter([(0.0, each)])) for n, wave in enumerate(plan) for each in wave]
    found: dict[int, int] = {}
    target = Simulation(
        cost_of(spec), config, iter(sessions), stride, tell=lambda s: found.update({s.id: s.miss.cached})
    )
    target.run()
    audit(target.engines[0].ledger)
    return [found[number] for number in sorted(found)]


# Ample memory is quick to check with two kinds of layers, and slow with the others.
SLOW = [("qwen3_next", 64 << 20), ("nemotron_h", 64 << 20)]
PREDICTED = [(family, 1 << 20) for family in ("qwen3_next", "lfm2", "nemotron_h", "gemma3")]
PREDICTED += [pytest.param(family, 64 << 20, marks=pytest.mark.thorough) for family in ("lfm2", "gemma3")]


@pytest.mark.parametrize(
    ("family", "memory"), [*PREDICTED, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_real_engine_hits_exactly_what_the_simulator_predicts(family, memory):
    spec = spec_of(family)
    settings = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640}
    plan = conversations(waves(3))
    try:
        engine = make_engine(family, memory_bytes=memory, **settings)
        engine.ledger.fits_alone(640) or pytest.skip("too small for this model")
    except OptionError:
        pytest.skip("too small for this model")
    hits = on_engine(engine, plan)
    assert hits == predicted(spec, engine.config, plan, stride=1)
    assert sum(hits) > 0
    if memory == 64 << 20:
        # In strides, too, as long as nobody waits for memory.
        assert hits == predicted(spec, engine.config, plan, stride=64)


# costs ----------------------------------------------------------------------------------------------------------------


def test_a_step_costs_its_arithmetic_or_its_traffic_and_what_it_writes():
    cost = replace(cost_model("qwen3-next-mini"), rates=DeviceRates(1e12, 1e12, 0.0))
    alone = cost.seconds(Work(1, 0, 0, 0))
    assert alone == pytest.approx(cost.weights_read(1) / 1e12)
    assert cost.weights_read(1) < cost.weights_read(64) < 2 * cost.parameters
    assert cost.seconds(Work(10**6, 0, 0, 0)) == pytest.approx(2 * cost.active_parameters * 1e6 / 1e12)
    assert cost.seconds(Work(1, 0, 0, 5e11)) == pytest.approx(alone + 0.5)


def test_the_embedded_model_is_known_by_its_name():
    assert 20e6 < cost_model("weft-small").parameters < 30e6
    with pytest.raises(OptionError, match="weft-small"):
        cost_model("weft-large")


@pytest.mark.parametrize("name", [*configurations.names(), *configurations.ALIASES])
def test_the_simulator_and_dummy_weights_know_the_same_names(name):
    place = find_checkpoint(name, with_weights=False)
    assert place == configurations.find(name)
    assert cost_model(name).parameters == shape_of(place).parameters


def test_an_unknown_name_lists_those_that_dummy_weights_know():
    with pytest.raises(OptionError, match=", ".join(configurations.names()).replace(".", r"\.")):
        cost_model("nemotron-nano-10b")


def test_rates_follow_from_a_benchmark(tmp_path):
    cost = cost_model("lfm2-1.2b")
    truth = replace(cost, rates=DeviceRates(2e13, 5e11, 1e-3))
    first = truth.seconds(Work(1000, 1000**2 / 2, 0, 0))
    later = truth.seconds(Work(1, 0, truth.kv_bytes_per_token * 1050 + truth.spec.state_bytes, 0))
    measured = {
        "options": {"concurrency": 1},
        "completed": 10,
        "total_input_tokens": 10_000,
        "total_output_tokens": 1000,
        "median_ttft_ms": 1000 * first,
        "median_tpot_ms": 1000 * later,
    }
    (tmp_path / "bench.json").write_text(json.dumps(measured))
    found = calibrated(cost, tmp_path / "bench.json").rates
    assert found.flops == pytest.approx(2e13, rel=0.01)
    assert found.bytes == pytest.approx(5e11, rel=0.01)
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(OptionError, match="not a result"):
        calibrated(cost, tmp_path / "bench.json")


# the command ----------------------------------------------------------------------------------------------------------


def test_the_command_knows_what_the_parts_know():
    assert set(KINDS) == set(WORKLOADS)
    assert EVICTIONS == POLICIES
    assert set(REASONS) == set(CaptureReasons.__slots__)
    assert set(ROUTERS) == set(routing.ROUTERS)


def test_the_command_tells_a_table_reasons_json_and_a_plot(tmp_path, capsys):
    given = ["--workload", "system-prompts", "--requests", "150", "--explain", "--no-progress"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert main(["simulate", *given, *files, "--eviction", "value", "--eviction", "lru"]) == 0
    told = capsys.readouterr().out
    assert "Share of the oracle" in told
    assert "never_computed: the next 64 tokens were never computed before" in told
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert 0 < runs["value"]["hit_rate"] < runs["value"]["hit_tokens"]
    lost = [miss["lost_tokens"] for miss in runs["value"]["misses"]]
    assert lost == sorted(lost, reverse=True)
    # Every token of a prompt that lies on the grid was hit or lost to a named cause.
    hit, reusable = runs["value"]["stats"]["cached_tokens"], runs["value"]["stats"]["reusable_tokens"]
    assert hit + sum(lost) == reusable
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_requests_that_are_refused_are_counted_with_the_reason(tmp_path, capsys):
    given = ["--workload", "coding", "--requests", "60", "--memory", "10%", "--explain", "--no-progress"]
    assert main(["simulate", *given, "--json", str(tmp_path / "out.json")]) == 1
    told = capsys.readouterr().out
    [sentence] = json.loads((tmp_path / "out.json").read_text())["runs"]["value"]["not_served"]
    assert re.fullmatch(
        r"42 of 42 requests refused: they need more than [\d.]+ MiB even when alone; "
        r"the longest, of [\d,]+ tokens, needs about [\d.]+ [MG]iB; raise --memory",
        sentence,
    )
    table, _, explanation = told.partition("Why not more")
    assert sentence in table
    assert sentence in explanation


def test_reasons_for_refusals_come_by_how_common_they_are():
    found = Found(Refusals(100), Refusals(1 << 30), requests=3, failed=1)
    assert not_served(replace(found, failed=0)) == []
    found.too_long.add(150, 150)
    found.too_long.add(120, 120)
    for length in (70, 90, 80):
        found.too_large.add(length, length << 30)
    assert found.refused == 5
    large, long, failed = not_served(found)
    assert large.startswith("3 of 9 requests refused: they need more than 1.00 GiB even when alone;")
    assert large.endswith("the longest, of 90 tokens, needs about 90.00 GiB; raise --memory")
    assert long == "2 of 9 requests refused: they exceed 100 tokens; the longest has 150; raise --max-length"
    assert failed.startswith("1 of 9 requests failed: memory ran out")


def test_every_policy_tells_its_own_refusals(capsys):
    given = ["--workload", "coding", "--requests", "60", "--max-length", "100", "--memory", "1GiB", "--no-progress"]
    assert main(["simulate", *given, "--eviction", "value", "--eviction", "lru"]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    assert [line.partition(":")[0] for line in told] == ["value", "lru"]
    assert all("they exceed 100 tokens" in line for line in told)


@pytest.mark.parametrize("value", ["x", "0%", "-3%", "auto", "%"])
def test_memory_that_makes_no_sense_is_refused(value):
    with pytest.raises(OptionError, match="memory"):
        read_memory(value)


# what it is for -------------------------------------------------------------------------------------------------------


def setup(name: str, requests: int, memory: float | int, **more) -> SimulationSetup:
    return SimulationSetup(Traffic(name, requests), cost_model("qwen3-next-mini"), memory, **more)


@pytest.mark.thorough
def test_value_beats_recency_where_states_are_heavy():
    hits = {policy: run(setup("sharegpt", 500, 0.1, eviction=policy)).hit_tokens for policy in ("value", "lru")}
    assert hits["value"] > 1.1 * hits["lru"]


def test_a_flood_of_strangers_does_not_wash_out_what_is_in_use():
    target = setup("scan", 450, 20 << 30)
    hits: list[list[tuple[int, int]]] = [[], [], []]

    def tell(sequence) -> None:
        if len(sequence.ask.stretches) > 1:
            hits[min(2, 3 * sequence.id // 450)].append((sequence.miss.cached, sequence.miss.reusable))

    run(target, tell)
    before, during, after = (sum(c for c, _ in part) / sum(r for _, r in part) for part in hits)
    assert during > 0.9 * before
    assert after > 0.9 * before


def test_a_prefix_is_hit_when_it_is_seen_for_the_second_time():
    """Pairs that share a beginning of any length, without a word from the caller about where it ends."""
    random, sessions, shared = Random(5), [], 0
    for pair in range(40):
        length = random.randint(128, 5000)
        shared += length // 64 * 64
        for member in range(2):
            text = Text(64, [(10 * pair, length), (10 * pair + 1 + member, random.randint(70, 1000))])
            request = replace(simulated_request(text, 10 * pair + 5 + member, 8), boundaries=())
            sessions.append(SimulatedSession(100.0 * len(sessions), iter([(0.0, request)])))
    found = simulation(setup("pairs", 0, 1 << 42), 1 << 42, 0.0, sessions=iter(sessions)).run()
    assert found.hit_tokens >= 0.95 * shared


def test_remembering_costs_no_throughput_where_nothing_is_shared():
    busy = {
        cache: run(
            SimulationSetup(
                Traffic("unique", 120, rate=100.0),
                cost_model("nemotron-nano-9b"),
                0.5,
                cache=cache,
                max_sequences=16,
                stride=1,
            )
        ).busy_seconds
        for cache in (True, False)
    }
    assert busy[True] <= 1.01 * busy[False]


def test_the_published_weight_is_found_by_replaying_the_first_requests():
    assert bootstrap_alpha(setup("retrieval", 60, 8 << 30, eviction="flops")) in (0.0, 0.5, 2.0)


def test_the_simulators_memory_is_bounded_by_the_live_trie():
    target = simulation(setup("unique", 300, 8 << 30), 8 << 30, 0.0)
    target.oracle = None
    target.run()
    (engine,) = target.engines
    arena = engine.ledger.arena
    assert len(engine.ledger.cache.trie) * engine.ledger.spec.page_bytes <= arena.slabs * arena.slab_bytes
    assert not engine.ledger.leases
    assert not engine.planner.running
