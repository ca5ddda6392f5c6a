"""The study behind docs/caching.md: what is worth remembering, on traces and made-up traffic.

    python -m benchmarks.caching matrix --json matrix.json      policies x workloads x models x memory
    python -m benchmarks.caching ample --json ample.json        the whole traces in memory without end
    python -m benchmarks.caching goals --json goals.json        second sighting, no sharing, a scan
    python -m benchmarks.caching curve --json curve.json        from 2 % to 200 % of the working set
    python -m benchmarks.caching matrix --seed 1 --json unseen.json --policies value,lru     traffic never looked at
    python -m benchmarks.caching tables matrix.json unseen.json the tables of the document, from those files
    python -m benchmarks.caching plots matrix.json curve.json   its plots, into docs/

One process, no device. The excerpts of Mooncake's traces in `benchmarks/traces` are used unless `--traces` names a
folder with the whole ones. A run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.memory.captures import Captures
from weft.simulate.costs import cost_model
from weft.simulate.oracle import Survey, survey
from weft.simulate.plots import bars, lines
from weft.simulate.runs import Setup, Traffic, run
from weft.simulate.sessions import Session
from weft.simulate.simulation import Found
from weft.simulate.text import Text, ask

MODELS = ("qwen3-next-mini", "nemotron-nano-9b", "lfm2-1.2b")
SHARES = (0.05, 0.10, 0.20)
CURVE = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# The plain ones keep what is published: ends of prompts and answers, junctions that pages show, every N tokens.
PLAIN = Captures(popular=False, boundaries=False, candidates=False)
POLICIES = {
    "value": ("value", Captures()),
    "lru": ("lru", Captures()),
    "flops": ("flops", Captures()),
    "lru-plain": ("lru", PLAIN),
    "flops-plain": ("flops", PLAIN),
}
# Requests of each workload: enough to turn the smallest memory over many times.
SIZES = {
    "conversation": 1500,
    "synthetic": 2000,
    "lmsys": 3000,
    "sharegpt": 1000,
    "coding": 450,
    "compacting": 450,
    "tools": 1200,
    "system-prompts": 1200,
    "retrieval": 350,
    "best-of-n": 900,
    "tree-search": 900,
}
TRACES = ("conversation", "synthetic")
PUBLISHED = Captures(popular=False, boundaries=False, answers=False, candidates=False)
Results = dict[str, Any]


def traffic(name: str, folder: str, whole: bool = False, seed: int = 0) -> Traffic:
    if name in TRACES:
        return Traffic(name, 0 if whole else SIZES[name], trace=f"{folder}/{name}.jsonl")
    return Traffic(name, SIZES.get(name, 2000), seed)


def told(found: Found, oracle_tokens: int) -> Results:
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
        "ttft_p99": found.first_token(0.99),
        "preemptions": stats["preemptions"],
    }


class Study:
    """Results by name, written after each one."""

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
    models: list[str],
    shares: tuple[float, ...],
    names: list[str],
    policies: list[str],
    seed: int = 0,
) -> None:
    for name, model, share, policy in product(names, models, shares, policies):
        sent = traffic(name, folder, seed=seed)
        study.add(f"{name}/{model}/{share}/{policy}", partial(_entry, sent, model, share, policy))


def _entry(sent: Traffic, model: str, share: float, policy: str) -> Results:
    eviction, captures = POLICIES[policy]
    known = _surveyed(sent)
    return told(run(Setup(sent, cost_model(model), share, eviction, captures, surveyed=known)), known.oracle_tokens)


@lru_cache
def _surveyed(sent: Traffic) -> Survey:
    return survey(sent.sessions(64), 64)


def ample(study: Study, folder: str) -> None:
    """Memory without end and the whole traces: how much of what the oracle would hit, and for how many snapshots."""
    for name in TRACES:
        base = Setup(traffic(name, folder, whole=True), cost_model(MODELS[0]), 1 << 50, oracle=True)
        variants = {
            "default": base,
            "without candidates": replace(base, captures=Captures(candidates=False)),
            "prompt end, junction, every 8192": replace(base, captures=PUBLISHED, capture_every=8192),
            "default, four times the working set": replace(base, memory=4.0),
        }
        for variant, setup in variants.items():
            study.add(f"ample/{name}/{variant}", lambda setup=setup: _with_oracle(setup))


def _with_oracle(setup: Setup) -> Results:
    found = run(setup)
    return told(found, found.oracle_tokens or 0)


def second_sighting(study: Study) -> None:
    """Pairs of prompts that share a beginning of random length (128 tokens at least) and nothing after it."""
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
            request = ask(text, 10 * pair + 5 + member, 64)
            sessions.append(Session(1000.0 * (2 * pair + member), iter([(0.0, replace(request, boundaries=()))])))
    setup = Setup(Traffic("pairs", 0), cost, 1 << 44)
    from weft.simulate.runs import simulation

    found = simulation(setup, 1 << 44, 0.0, sessions=iter(sessions)).run()
    return {"hit_tokens": found.hit_tokens, "shared_tokens": 64 * shared_cells}


def no_sharing(study: Study) -> None:
    """Nothing is ever reused: what remembering costs. All at once, so that the device's time is all that counts."""
    for model in MODELS:
        for cache in (True, False):
            busy = replace(traffic("unique", ""), rate=200.0, requests=400)
            # Step by step: in strides, batches fall differently, and that is more than what is measured here.
            setup = Setup(busy, cost_model(model), 0.5, cache=cache, stride=1)
            study.add(f"no sharing/{model}/cache {'on' if cache else 'off'}", lambda setup=setup: told(run(setup), 0))


def scan(study: Study) -> None:
    """Hits of the warm set in the flood and after it, against the same traffic without a flood."""
    for model in MODELS:
        for policy in ("value", "lru", "flops"):
            study.add(f"scan/{model}/{policy}", lambda model=model, policy=policy: _scan(model, policy))


def _scan(model: str, policy: str) -> Results:
    cost, requests = cost_model(model), 1800
    warm = survey(Traffic("scan", requests // 3).sessions(64), 64)
    hits: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}

    def tell(sequence: Any) -> None:
        flood = len(sequence.ask.stretches) == 1
        if not flood and sequence.miss is not None:
            hits[min(2, 3 * sequence.id // requests)].append((sequence.miss.cached, sequence.miss.reusable))

    # Room for the warm set and the running requests, and a tenth of what the flood brings.
    memory = int(1.5 * warm.working_set_bytes(cost.spec))
    run(Setup(Traffic("scan", requests), cost, memory, policy), tell)
    shares = {part: sum(c for c, _ in found) / max(1, sum(r for _, r in found)) for part, found in hits.items()}
    return {"before": shares[0], "during": shares[1], "after": shares[2]}


def curve(study: Study, folder: str) -> None:
    for name in ("sharegpt", "system-prompts"):
        matrix(study, folder, ["qwen3-next-mini"], CURVE, [name], ["value", "lru-plain"])


# tables ---------------------------------------------------------------------------------------------------------------


def geometric_mean(values: list[float]) -> float:
    return exp(fmean(log(max(value, 1e-6)) for value in values)) if values else 0.0


def ratios(results: Results, other: str) -> dict[tuple[str, str, str], float]:
    """Hit tokens of the default over those of another policy, by workload, model and memory."""
    found = {}
    for name, result in results.items():
        workload, model, share, policy = name.split("/")
        against = results.get(f"{workload}/{model}/{share}/{other}")
        if policy == "value" and against is not None:
            found[workload, model, share] = max(result["hit_tokens"], 1) / max(against["hit_tokens"], 1)
    return found


OTHERS = {"lru": "LRU", "lru-plain": "LRU with the published captures", "flops": "FLOP-aware"}


def matrix_tables(results: Results) -> str:
    """Share of the oracle's hits, and hits over those of the others: a row per workload, a column per memory."""

    def share(*key: str) -> float:
        each = results["/".join([*key, "value"])]
        return each["hit_tokens"] / max(1, each["oracle_tokens"])

    parts = ["Share of the oracle's hit tokens under `value`:", _grid(results, share, "{:.0%}")]
    for other, name in OTHERS.items():
        found = ratios(results, other)
        if not found:
            continue
        lowest = min(found, key=lambda key: found[key])
        parts += [
            f"Hit tokens over those of {name}:",
            _grid(results, lambda *key, found=found: found.get(key), "{:.2f}"),
        ]
        parts.append(
            f"Geometric mean of {len(found)}: **{geometric_mean(list(found.values())):.2f}**; "
            f"lowest: {found[lowest]:.2f} ({', '.join(lowest[:2])}, {float(lowest[2]):.0%}).\n"
        )
    return "\n".join(parts)


def held_out(results: Results, unseen: Results) -> str:
    """Hits over LRU's on traffic that no constant was chosen by, and on the same entries of what was looked at."""
    found, known = ratios(unseen, "lru"), ratios(results, "lru")
    lowest = min(found, key=lambda key: found[key])
    rows = [
        f"Hit tokens over those of LRU on seeds that no constant was chosen by, {len(found)} entries:",
        "",
        "| workload | " + " | ".join(dict.fromkeys(f"{m.split('-')[0]} {float(s):.0%}" for _, m, s in found)) + " |",
        "|---|" + "---:|" * len({key[1:] for key in found}),
    ]
    for workload in dict.fromkeys(key[0] for key in found):
        cells = [f"{value:.2f}" for key, value in found.items() if key[0] == workload]
        rows.append(f"| {workload} | {' | '.join(cells)} |")
    seen = geometric_mean([known[key] for key in found if key in known])
    mean = geometric_mean(list(found.values()))
    rows.append(f"\nGeometric mean **{mean:.2f}** (the same entries of the seed that was looked at: {seen:.2f}); ")
    return "\n".join(rows) + f"lowest: {found[lowest]:.2f} ({', '.join(lowest[:2])}, {float(lowest[2]):.0%})."


def _grid(results: Results, value: Callable[..., float | None], form: str) -> str:
    keys = list(ratios(results, "lru"))
    columns = list(dict.fromkeys((model, share) for _, model, share in keys))
    heads = [f"{model.split('-')[0]} {float(share):.0%}" for model, share in columns]
    rows = ["", "| workload | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(columns)]
    for workload in dict.fromkeys(workload for workload, _, _ in keys):
        known = [value(workload, *each) if (workload, *each) in keys else None for each in columns]
        cells = ["" if each is None else form.format(each) for each in known]
        rows.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def draw(results: Results, curves: Results, folder: Path) -> None:
    """The plots of the document."""
    workloads = list(dict.fromkeys(name.split("/")[0] for name in results))
    series = {}
    for other, name in OTHERS.items():
        found = ratios(results, other)
        series[name.removesuffix(" with the published captures") + (", plain" if "plain" in other else "")] = {
            w: geometric_mean([v for k, v in found.items() if k[0] == w]) for w in workloads
        }
    title = "Hit tokens, mean over models and memory of 5, 10 and 20 %"
    (folder / "caching-workloads.svg").write_text(bars(title, series, "times as many", mark=1.0))
    for workload in dict.fromkeys(name.split("/")[0] for name in curves):
        points: dict[str, list[tuple[float, float]]] = {"value": [], "lru-plain": []}
        for name, each in curves.items():
            which, _, share, policy = name.split("/")
            if which == workload:
                points[policy].append((float(share), each["hit_tokens"] / max(1, each["oracle_tokens"])))
        text = lines(
            f"{workload}, states of Qwen3-Next", points, "memory / working set", "share of the oracle", True, True
        )
        (folder / f"caching-{workload}.svg").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("matrix", "ample", "goals", "curve", "tables", "plots"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--json", default="caching.json")
    parser.add_argument("--traces", default=str(Path(__file__).parent / "traces"))
    parser.add_argument("--workloads", default=",".join(SIZES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=0, help="of made-up traffic; constants were chosen on 0")
    options = parser.parse_args()
    if options.part == "tables":
        known, *unseen = (json.loads(Path(file).read_text()) for file in options.files)
        print(matrix_tables(known), *(held_out(known, each) for each in unseen), sep="\n")
        return
    if options.part == "plots":
        draw(*(json.loads(Path(file).read_text()) for file in options.files[:2]), Path("docs"))
        return
    study = Study(options.json)
    if options.part == "matrix":
        names, policies = options.workloads.split(","), options.policies.split(",")
        matrix(study, options.traces, options.models.split(","), SHARES, names, policies, options.seed)
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
