"""What routing saves: eight simulated replicas on Mooncake's traces, against one engine with all their memory.

    python -m benchmarks.fleet --json fleet.json                        the held-out part of both traces, both models
    python -m benchmarks.fleet --json tuned.json --part tuned           the part on which the policy was tuned
    python -m benchmarks.fleet --json fleet.json --table                the table of docs/fleet.md
    python -m benchmarks.fleet --json speeds.json --routers prefix,state --speeds 0.96,0.98,1.0,1.02,1.04 --processes 8
    python -m benchmarks.fleet --json speeds.json --compare prefix,state

Needs no GPU. Requests arrive so fast that one engine without a cache would need eight times as long. "One cache" is an
engine with the memory and eight times the speed of one replica. An interrupted run resumes where it stopped. Medians of
single runs depend on the order of choices, so `--speeds` repeats the runs with the trace a little slower and faster,
and `--compare` shows two routers over all speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Cell:
    """One model on one trace."""

    model: str
    trace: str
    part: str
    gib: int
    folder: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.trace}"

    def setup(self, speed: float | None = None) -> SimulationSetup:
        """Return eight replicas' memory, and the trace at a speed."""
        asked = traffic(self.trace, self.folder, self.part)
        asked = asked if speed is None else replace(asked, speed=speed)
        return SimulationSetup(asked, cost_model(self.model), REPLICAS * self.gib << 30, max_length=200_000)


def run_name(cell: Cell, router: str, factor: float) -> str:
    """Return the name of a run among the results; those at the table's speed have none of their own."""
    return f"{cell.name}/{router}" + ("" if factor == 1 else f"@{factor}")


def speed_of(cell: Cell) -> dict[str, float]:
    return {"speed": saturating_speed(cell.setup())}


def summary_of(cell: Cell, router: str, speed: float) -> dict[str, float]:
    return summary(routed(cell.setup(speed), router))


def study(args: argparse.Namespace) -> None:
    path = Path(args.json)
    results: Results = json.loads(path.read_text()) if path.exists() else {}

    def add(name: str, found: dict[str, float]) -> None:
        results[name] = found
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)

    models, traces, routers = (each.split(",") for each in (args.models, args.traces, args.routers))
    cells = [Cell(model, trace, args.part, args.gib, args.folder) for model in models for trace in traces]
    factors = [float(factor) for factor in args.speeds.split(",")]
    with ProcessPoolExecutor(args.processes) as pool:
        flights = {pool.submit(speed_of, cell): cell.name for cell in cells if cell.name not in results}
        for done in as_completed(flights):
            add(flights[done], done.result())
        flights = {}
        for cell in cells:
            for factor in factors:
                speed = REPLICAS * results[cell.name]["speed"] * factor
                for router in routers:
                    name = run_name(cell, router, factor)
                    if name not in results:
                        flights[pool.submit(summary_of, cell, router, speed)] = name
        for done in as_completed(flights):
            add(flights[done], done.result())


def ratios(results: Results, cell: str, routers: tuple[str, str]) -> Iterator[float]:
    """Yield the median time to the first token of the second router over that of the first, for each speed."""
    prefix = f"{cell}/{routers[0]}"
    for name in results:
        if name == prefix or name.startswith(f"{prefix}@"):
            other = f"{cell}/{routers[1]}" + name[len(prefix) :]
            if other in results:
                yield results[other]["p50"] / results[name]["p50"]


def comparison(results: Results, routers: tuple[str, str]) -> str:
    lines = [
        f"| model, trace | p50 of {routers[1]} / {routers[0]} | standard error | shorter in |",
        "|---|--:|--:|--:|",
    ]
    for cell in [name for name in results if name.count("/") == 1]:
        found = list(ratios(results, cell, routers))
        if found:
            error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            shorter = f"{sum(ratio < 1 for ratio in found)} of {len(found)}"
            lines.append(f"| {cell.replace('/', ', ')} | {statistics.mean(found):.3f} | {error:.3f} | {shorter} |")
    return "\n".join(lines)


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
    parser.add_argument("--speeds", default="1", help="times the speed that saturates eight engines without a cache")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--compare", metavar="A,B", help="compare two routers over all speeds that are already there")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(Path(args.json).read_text())))
    elif args.compare:
        first, second = args.compare.split(",")
        print(comparison(json.loads(Path(args.json).read_text()), (first, second)))
    else:
        study(args)


if __name__ == "__main__":
    main()
