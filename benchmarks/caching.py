"""The study behind docs/lab/caching.md: which states are worth keeping, on recorded and synthetic traffic.

    python -m benchmarks.caching matrix --json matrix.json      policies x workloads x models x memory, both parts
    python -m benchmarks.caching ample --json ample.json        the whole traces with unlimited memory
    python -m benchmarks.caching goals --json goals.json        second sighting, no sharing, scan
    python -m benchmarks.caching curve --json curve.json        2 % to 200 % of the working set
    python -m benchmarks.caching tiers --json tiers.json        host memory and a file below the device
    python -m benchmarks.caching states --json states.json      states in fewer bits, in the same memory
    python -m benchmarks.caching tables matrix.json goals.json  the tables of docs/lab/caching.md
    python -m benchmarks.caching plots matrix.json curve.json   its plots, written to docs/lab/
    python -m benchmarks.caching tier-plots tiers.json          the table and the plots of tiers, written to docs/lab/

Runs in one process and needs no GPU. Traffic has two parts: policies may be tuned on one (`--parts tuned`); the other
is for the report only (`--parts held-out`). An interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.caching_tables import OTHERS, PARTS, Results, all_tables, geometric_mean, hits, ratios
from weft.base.options import STATE_DTYPES
from weft.memory.captures import CaptureReasons
from weft.simulate.costs import cost_model
from weft.simulate.found import Found
from weft.simulate.oracle import Survey, survey
from weft.simulate.plots import bars, lines
from weft.simulate.sessions import SimulatedSession
from weft.simulate.setup import SimulationSetup, Traffic, run
from weft.simulate.text import Text, simulated_request

MODELS = ("qwen3-next-mini", "nemotron-nano-9b-v2", "lfm2-1.2b")
SHARES = (0.02, 0.05, 0.10, 0.20, 0.50)
CURVE = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# The plain policies capture what published systems do: ends of prompts and answers, junctions found by matching pages,
# and every N tokens.
PLAIN = CaptureReasons(popular=False, boundaries=False, candidates=False)
POLICIES = {
    "value": ("value", CaptureReasons()),
    "lru": ("lru", CaptureReasons()),
    "flops": ("flops", CaptureReasons()),
    "lru-plain": ("lru", PLAIN),
    "flops-plain": ("flops", PLAIN),
}
# Requests of each workload: enough to replace the contents of the smallest memory many times.
SIZES = {
    "lmsys": 1500,
    "sharegpt": 1000,
    "coding": 900,
    "compacting": 900,
    "tools": 1200,
    "system-prompts": 1200,
    "retrieval": 700,
    "best-of-n": 900,
    "tree-search": 1800,
    "unique": 2400,
    "scan": 900,
}
# Synthetic traffic is split by seed, traces by line: (lines to skip, lines to run). The lines before the tuned part may
# be used for tuning too, but would make the report take too long.
SEEDS = {"tuned": 0, "held-out": 7}
LINES = {
    "conversation": {"tuned": (6000, 2000), "held-out": (8000, 2000)},
    "synthetic": {"tuned": (0, 2000), "held-out": (2000, 1993)},
}
WORKLOADS = (*SIZES, *LINES)
# Memory of the device, host memory and the file, as shares of the working set.
TIERS = {
    "device": {"memory": 0.05},
    "+ host": {"memory": 0.05, "host_memory": 0.2},
    "+ host + disk": {"memory": 0.05, "host_memory": 0.2, "disk": 1.0},
}
TIER_WORKLOADS = ("conversation", "synthetic", "sharegpt", "coding")
TIER_MODELS = ("nemotron-nano-9b-v2", "qwen3-next-mini")
# The memory in which smaller states are compared.
SMALL_SHARE = 0.05
PARTS_OF_STUDY = ("matrix", "ample", "goals", "curve", "tiers", "states", "tables", "plots", "tier-plots")
PUBLISHED = CaptureReasons(popular=False, boundaries=False, answers=False, candidates=False)


def traffic(name: str, folder: str, part: str = "tuned") -> Traffic:
    if name in LINES:
        skip, lines = LINES[name][part]
        return Traffic(name, lines, trace=f"{folder}/{name}.jsonl.gz", skip=skip)
    return Traffic(name, SIZES[name], SEEDS[part])


def summary(found: Found, oracle_tokens: int) -> Results:
    stats = found.stats
    return {
        "requests": found.requests,
        "refused": found.refused + found.failed,
        "prompt_tokens": found.prompt_tokens,
        "hit_tokens": found.hit_tokens,
        "oracle_tokens": oracle_tokens,
        "snapshots": {str(origin): count for origin, count in stats["kept"].items()},
        "candidates": stats["candidates"],
        "seconds": found.seconds,
        "busy_seconds": found.busy_seconds,
        "ttft_p50": found.first_token(0.5),
        "ttft_p90": found.first_token(0.9),
        "ttft_p99": found.first_token(0.99),
        "preemptions": stats["preemptions"],
    }


class Study:
    """Results by name, written to the file after each measurement."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.results: Results = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name: str, measure: Callable[[], Results]) -> Results:
        if name not in self.results:
            self.results[name] = measure()
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")
            print(name, json.dumps(self.results[name])[:160], flush=True)
        return self.results[name]


def matrix(
    study: Study,
    folder: str,
    parts: list[str],
    models: list[str],
    shares: tuple[float, ...],
    names: list[str],
    policies: list[str],
) -> None:
    for part, model, name, share, policy in product(parts, models, names, shares, policies):
        sent = traffic(name, folder, part)
        study.add(f"{part}/{name}/{model}/{share}/{policy}", partial(_entry, sent, model, share, policy))


def _entry(sent: Traffic, model: str, share: float, policy: str) -> Results:
    eviction, captures = POLICIES[policy]
    known = _surveyed(sent)
    return summary(
        run(SimulationSetup(sent, cost_model(model), share, eviction, captures, surveyed=known)), known.oracle_tokens
    )


@lru_cache
def _surveyed(sent: Traffic) -> Survey:
    return survey(sent.sessions(64), 64)


def ample(study: Study, folder: str) -> None:
    """Replay the whole traces with unlimited memory: the share of the oracle's hits, and the snapshots they cost."""
    for name in LINES:
        whole = Traffic(name, 0, trace=f"{folder}/{name}.jsonl.gz")
        base = SimulationSetup(whole, cost_model(MODELS[0]), 1 << 50, oracle=True)
        variants = {
            "default": base,
            "without candidates": replace(base, captures=CaptureReasons(candidates=False)),
            "prompt end, junction, every 8192": replace(base, captures=PUBLISHED, capture_every=8192),
            "default, four times the working set": replace(base, memory=4.0),
        }
        for variant, setup in variants.items():
            study.add(f"ample/{name}/{variant}", lambda setup=setup: _with_oracle(setup))


def _with_oracle(setup: SimulationSetup) -> Results:
    found = run(setup)
    return summary(found, found.oracle_tokens or 0)


def second_sighting(study: Study) -> None:
    """Measure hits in pairs of prompts that share a prefix of random length (at least 128 tokens) and nothing else."""
    for model in MODELS:
        study.add(f"second sighting/{model}", lambda model=model: _pairs(model))


def _pairs(model: str, pairs: int = 400) -> Results:
    from random import Random

    random, cost = Random(0), cost_model(model)
    sessions, shared_cells = [], 0
    for pair in range(pairs):
        shared = round(128 * (8000 / 128) ** random.random())
        shared_cells += shared // 64
        for member in range(2):
            own = 10 * pair + 1 + member
            text = Text(64, [(10 * pair, shared), (own, random.randint(100, 3000))])
            request = simulated_request(text, 10 * pair + 5 + member, 64)
            sessions.append(
                SimulatedSession(1000.0 * (2 * pair + member), iter([(0.0, replace(request, boundaries=()))]))
            )
    setup = SimulationSetup(Traffic("pairs", 0), cost, 1 << 44)
    from weft.simulate.setup import simulation

    found = simulation(setup, 1 << 44, 0.0, sessions=iter(sessions)).run()
    return {"hit_tokens": found.hit_tokens, "shared_tokens": 64 * shared_cells}


def no_sharing(study: Study) -> None:
    """Measure the overhead of the cache when nothing is reused. Requests arrive at once, so device time decides."""
    for model in MODELS:
        for cache in (True, False):
            busy = Traffic("unique", 400, rate=200.0)
            # Stride 1: longer strides form different batches, which changes more than the overhead measured here.
            setup = SimulationSetup(busy, cost_model(model), 0.5, cache=cache, stride=1)
            study.add(
                f"no sharing/{model}/cache {'on' if cache else 'off'}", lambda setup=setup: summary(run(setup), 0)
            )


def scan(study: Study) -> None:
    """Measure the warm set's hits before, during and after a flood of requests that share nothing."""
    for model in MODELS:
        for policy in ("value", "lru", "flops"):
            study.add(f"scan/{model}/{policy}", lambda model=model, policy=policy: _scan(model, policy))


def _scan(model: str, policy: str) -> Results:
    cost, requests = cost_model(model), 1800
    warm = survey(Traffic("scan", requests // 3).sessions(64), 64)
    hits: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}

    def record(sequence: Any) -> None:
        flood = len(sequence.ask.stretches) == 1
        if not flood and sequence.miss is not None:
            hits[min(2, 3 * sequence.id // requests)].append((sequence.miss.cached, sequence.miss.reusable))

    # Room for the warm set, the running requests and a tenth of the flood.
    memory = int(1.5 * warm.working_set_bytes(cost.spec))
    run(SimulationSetup(Traffic("scan", requests), cost, memory, policy), record)
    shares = {part: sum(c for c, _ in found) / max(1, sum(r for _, r in found)) for part, found in hits.items()}
    return {"before": shares[0], "during": shares[1], "after": shares[2]}


def curve(study: Study, folder: str) -> None:
    for name in ("sharegpt", "system-prompts"):
        matrix(study, folder, ["tuned"], ["qwen3-next-mini"], CURVE, [name], ["value", "lru-plain"])


def tiers(study: Study, folder: str, models: list[str], names: list[str]) -> None:
    """Measure what each tier adds: hits, and the time to the first token."""
    for model, name, (variant, sizes) in product(models, names, TIERS.items()):
        study.add(f"tiers/{name}/{model}/{variant}", partial(_tiered, traffic(name, folder, "held-out"), model, sizes))


def _tiered(sent: Traffic, model: str, sizes: dict[str, float]) -> Results:
    known = _surveyed(sent)
    found = run(SimulationSetup(sent, cost_model(model), surveyed=known, **sizes))
    moved = {name: each["loaded_tokens"] for name, each in found.stats.get("tiers", {}).items()}
    return summary(found, known.oracle_tokens) | {"loaded_tokens": moved}


def states(study: Study, folder: str, models: list[str], names: list[str], share: float) -> None:
    """Measure smaller states in the memory that is this share of the working set with states in float32."""
    for model, name in product(models, names):
        sent = traffic(name, folder, "held-out")
        for dtype in STATE_DTYPES:
            study.add(f"states/{name}/{model}/{dtype}", partial(_with_states, sent, model, dtype, share))
    print("| workload | model | states | hits / oracle | TTFT p50, ms | p90, ms | device busy, s |")
    print("|---|---|---|---:|---:|---:|---:|")
    for entry, each in study.results.items():
        _, name, model, dtype = entry.split("/")
        times = f"{1000 * each['ttft_p50']:,.0f} | {1000 * each['ttft_p90']:,.0f} | {each['busy_seconds']:,.0f}"
        print(f"| {name} | {model} | {dtype} | {each['hit_tokens'] / max(1, each['oracle_tokens']):.1%} | {times} |")


def _with_states(sent: Traffic, model: str, dtype: str, share: float) -> Results:
    known = _surveyed(sent)
    memory = int(share * known.working_set_bytes(cost_model(model).spec))
    return summary(run(SimulationSetup(sent, cost_model(model, dtype), memory)), known.oracle_tokens)


# reports -------------------------------------------------------------------------------------------------------------


def draw(results: Results, curves: Results, folder: Path) -> None:
    """Write the plots of docs/lab/caching.md."""
    series = {}
    for other, name in OTHERS.items():
        found = ratios(results, "held-out", other, hits)
        workloads = list(dict.fromkeys(workload for workload, _, _ in found))
        if not found:
            continue
        series[name.removesuffix(" with the published captures") + (", plain" if "plain" in other else "")] = {
            w: geometric_mean([v for k, v in found.items() if k[0] == w]) for w in workloads
        }
    title = "Hit tokens, mean over models and memory"
    (folder / "caching-workloads.svg").write_text(bars(title, series, "times as many", mark=1.0))
    for workload in dict.fromkeys(name.split("/")[1] for name in curves):
        points: dict[str, list[tuple[float, float]]] = {"value": [], "lru-plain": []}
        for name, each in curves.items():
            _, which, _, share, policy = name.split("/")
            if which == workload:
                points[policy].append((float(share), each["hit_tokens"] / max(1, each["oracle_tokens"])))
        text = lines(
            f"{workload}, states of Qwen3-Next", points, "memory / working set", "share of the oracle", True, True
        )
        (folder / f"caching-{workload}.svg").write_text(text)


def draw_tiers(results: Results, folder: Path) -> None:
    """Write the plots of tiers, and print their table."""
    shares: dict[str, dict[str, float]] = {variant: {} for variant in TIERS}
    faster: dict[str, dict[str, float]] = {variant: {} for variant in TIERS}
    print("| workload | model | | hits / oracle | from host | from disk | TTFT p50, ms | p90, ms | device busy, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, each in results.items():
        _, workload, model, variant = name.split("/")
        first = results[f"tiers/{workload}/{model}/device"]
        # Longer names would not fit below the bars.
        group = f"{workload}, {model[0].upper()}"
        shares[variant][group] = each["hit_tokens"] / max(1, each["oracle_tokens"])
        faster[variant][group] = each["ttft_p90"] / max(1e-9, first["ttft_p90"])
        loaded = [f"{each['loaded_tokens'].get(tier, 0) / 1e6:.2f} M" for tier in ("host", "disk")]
        times = f"{1000 * each['ttft_p50']:,.0f} | {1000 * each['ttft_p90']:,.0f} | {each['busy_seconds']:,.0f}"
        print(f"| {workload} | {model} | {variant} | {shares[variant][group]:.1%} | {' | '.join(loaded)} | {times} |")
    title = "Hit tokens with tiers below the device"
    (folder / "caching-tiers.svg").write_text(bars(title, shares, "share of the oracle", mark=1.0))
    title = "Time to first token, 90th percentile"
    (folder / "caching-tiers-ttft.svg").write_text(bars(title, faster, "over that without tiers", mark=1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS_OF_STUDY)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--json", default="caching.json")
    parser.add_argument("--traces", default=str(Path(__file__).parent / "traces"))
    parser.add_argument("--parts", default=",".join(PARTS), help="tuned, held-out or both, separated by a comma")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="memory sizes as shares of the working set"
    )
    options = parser.parse_args()
    if options.part == "tables":
        known = {name: each for file in options.files for name, each in json.loads(Path(file).read_text()).items()}
        print(all_tables(known))
        return
    if options.part == "plots":
        draw(*(json.loads(Path(file).read_text()) for file in options.files[:2]), Path("docs/lab"))
        return
    if options.part == "tier-plots":
        draw_tiers(json.loads(Path(options.files[0]).read_text()), Path("docs/lab"))
        return
    study = Study(options.json)
    if options.part == "matrix":
        chosen = (getattr(options, each).split(",") for each in ("parts", "models", "shares", "workloads", "policies"))
        parts, models, shares, names, policies = chosen
        matrix(study, options.traces, parts, models, tuple(map(float, shares)), names, policies)
    elif options.part == "tiers":
        models = [model for model in options.models.split(",") if model in TIER_MODELS]
        tiers(study, options.traces, models, [name for name in TIER_WORKLOADS if name in options.workloads.split(",")])
    elif options.part == "states":
        states(study, options.traces, options.models.split(","), options.workloads.split(","), SMALL_SHARE)
    elif options.part == "curve":
        curve(study, options.traces)
    elif options.part == "ample":
        ample(study, options.traces)
    else:
        second_sighting(study)
        no_sharing(study)
        scan(study)


if __name__ == "__main__":
    main()
