"""What routing saves: eight simulated replicas on Mooncake's traces, against one engine with all their memory.

    python -m benchmarks.fleet --json fleet.json                        the held-out part of both traces, both models
    python -m benchmarks.fleet --json tuned.json --part tuned           the part on which the policy was tuned
    python -m benchmarks.fleet --json fleet.json --table                the table of docs/fleet.md

Needs no GPU. Requests arrive so fast that one engine without a cache would need eight times as long. "One cache" is an
engine with the memory and eight times the speed of one replica. An interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from benchmarks.caching import LINES, traffic
from weft.simulate.costs import CostModel, DeviceRates, cost_model
from weft.simulate.found import Found
from weft.simulate.setup import SimulationSetup, run

REPLICAS = 8
MODELS = ("qwen3-next-mini", "nemotron-nano-9b-v2")
ROUTERS = ("one", "round-robin", "hash", "prefix", "state")
# Requests from whose makespan the speed of one engine follows.
SAMPLE = 500
Results = dict[str, dict[str, float]]


def times_faster(cost: CostModel, factor: int) -> CostModel:
    rates = cost.rates
    return replace(cost, rates=DeviceRates(rates.flops * factor, rates.bytes * factor, rates.step_seconds / factor))


def saturating_speed(setup: SimulationSetup) -> float:
    """Return how much faster the trace would have to be for one engine without a cache to be just saturated."""
    sample = replace(setup.traffic, requests=SAMPLE)
    seconds = max(session.start for session in sample.sessions(setup.cost.spec.cell))
    at_once = replace(setup, traffic=replace(sample, speed=1e6), cache=False)
    return seconds / run(at_once).seconds


def summary(found: Found) -> dict[str, float]:
    return {
        "hits": found.hit_tokens / found.prompt_tokens,
        "p50": found.first_token(0.5),
        "p90": found.first_token(0.9),
        "p99": found.first_token(0.99),
        "imbalance": found.imbalance,
        "not_served": found.refused + found.failed,
    }


def routed(setup: SimulationSetup, router: str) -> Found:
    if router != "one":
        return run(replace(setup, replicas=REPLICAS, router=router))
    fast = times_faster(setup.cost, REPLICAS)
    return run(replace(setup, cost=fast, max_sequences=REPLICAS * setup.max_sequences))


def study(args: argparse.Namespace) -> None:
    path = Path(args.json)
    results: Results = json.loads(path.read_text()) if path.exists() else {}

    def add(name: str, found: dict[str, float]) -> None:
        results[name] = found
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)

    for model in args.models.split(","):
        for trace in args.traces.split(","):
            whole = f"{model}/{trace}"
            asked = traffic(trace, args.folder, args.part)
            memory = REPLICAS * args.gib << 30
            setup = SimulationSetup(asked, cost_model(model), memory, max_length=200_000)
            if whole not in results:
                add(whole, {"speed": saturating_speed(setup)})
            speed = REPLICAS * results[whole]["speed"]
            setup = replace(setup, traffic=replace(asked, speed=speed))
            for router in args.routers.split(","):
                if f"{whole}/{router}" not in results:
                    add(f"{whole}/{router}", summary(routed(setup, router)))


def table(results: Results) -> str:
    lines = [
        "| model, trace, speed | router | hit tokens | of one cache | p50 | p90 | p99 | busiest / mean |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for whole in [name for name in results if name.count("/") == 1]:
        one = results.get(f"{whole}/one", {}).get("hits")
        for router in ROUTERS:
            found = results.get(f"{whole}/{router}")
            if found is None:
                continue
            share = "-" if one is None else f"{found['hits'] / one:.2f}"
            label = (
                f"{whole.replace('/', ', ')}, {REPLICAS * results[whole]['speed']:.1f}x" if router == ROUTERS[0] else ""
            )
            times = " | ".join(f"{1000 * found[each]:,.0f} ms" for each in ("p50", "p90", "p99"))
            lines.append(f"| {label} | {router} | {found['hits']:.1%} | {share} | {times} | {found['imbalance']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--part", default="held-out", choices=("tuned", "held-out"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--traces", default=",".join(LINES))
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--gib", type=int, default=100, help="cache of each replica; an H200 has room for 100")
    parser.add_argument("--folder", default="benchmarks/traces")
    parser.add_argument("--table", action="store_true", help="print the table of results that are already there")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(Path(args.json).read_text())))
    else:
        study(args)


if __name__ == "__main__":
    main()
