"""Format the tables of docs/lab/caching.md from the JSON files that `benchmarks.caching` writes. Runs no simulation.

The name of an entry says where it belongs: `part/workload/model/share/policy` to the matrix; `ample/...`, `second
sighting/...`, `no sharing/...` and `scan/...` to the goals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log
from statistics import fmean
from typing import Any

PARTS = ("tuned", "held-out")
Results = dict[str, Any]


def all_tables(results: Results) -> str:
    """Return every table that the results have entries for."""
    found = {f"{part.capitalize()}": part_tables(results, part) for part in PARTS} | {"Goals": goal_table(results)}
    text = "\n".join(f"### {title}\n\n{table}" for title, table in found.items() if table)
    if not text:
        raise SystemExit(f"no entry of the files belongs to a table; they start with {[*results][:3]}")
    return text


def entries(results: Results, part: str) -> Iterator[tuple[str, Results]]:
    """Return the entries whose name starts with the part."""
    return ((name, each) for name, each in results.items() if name.startswith(f"{part}/"))


def goal_table(results: Results) -> str:
    """Return a table with a row per goal and model, or an empty string if no goal was measured."""
    rows = [row for make in (ample_rows, sighting_rows, sharing_rows, scan_rows) for row in make(results)]
    return "\n".join(["| what | goal | found |", "|---|---|---|", *rows, ""]) if rows else ""


def ample_rows(results: Results) -> Iterator[str]:
    for name, each in entries(results, "ample"):
        _, trace, variant = name.split("/")
        goal = "≥ 98 % of the oracle at ≤ 1.5 snapshots a request" if variant == "default" else "none, for comparison"
        share, kept = each["hit_tokens"] / max(1, each["oracle_tokens"]), sum(each["snapshots"].values())
        found = f"{share:.1%} at {kept / max(1, each['requests']):.2f} snapshots a request"
        yield f"| whole `{trace}` trace ({each['requests']:,} requests), {variant} | {goal} | {found} |"


def sighting_rows(results: Results) -> Iterator[str]:
    for name, each in entries(results, "second sighting"):
        what = f"second sighting of a prefix of 128 to 8,000 tokens, {name.split('/')[1]}"
        found = each["hit_tokens"] / max(1, each["shared_tokens"])
        yield f"| {what} | ≥ 95 % of the shared full cells | {found:.1%} |"


def sharing_rows(results: Results) -> Iterator[str]:
    for name, each in entries(results, "no sharing"):
        _, model, cache = name.split("/")
        without = results.get(f"no sharing/{model}/cache off")
        if cache == "cache on" and without is not None:
            lost = 1 - without["seconds"] / each["seconds"]
            yield f"| no sharing at all, {model} | ≤ 1 % of throughput lost | {lost:.2%} |"


def scan_rows(results: Results) -> Iterator[str]:
    for name, each in entries(results, "scan"):
        _, model, policy = name.split("/")
        shares = ", ".join(f"{each[when]:.0%}" for when in ("before", "during", "after"))
        found = f"share of the warm requests' tokens hit before, during and after the flood: {shares}"
        yield f"| scan through a warm cache, {model}, {policy} | ≥ 90 % of the warm set's hits kept | {found} |"


def geometric_mean(values: list[float]) -> float:
    return exp(fmean(log(max(value, 1e-6)) for value in values)) if values else 0.0


Entry = tuple[str, str, str]  # workload, model and memory


def ratios(results: Results, part: str, other: str, value: Callable[[Results], float]) -> dict[Entry, float]:
    """Divide the default policy's value by another policy's, for every entry that both have."""
    found = {}
    for name, result in entries(results, part):
        _, workload, model, share, policy = name.split("/")
        against = results.get(f"{part}/{workload}/{model}/{share}/{other}")
        if policy == "value" and against is not None and result["requests"]:
            found[workload, model, share] = value(result) / value(against)
    return found


def hits(result: Results) -> float:
    return max(result["hit_tokens"], 1)


OTHERS = {"lru": "LRU", "lru-plain": "LRU with the published captures", "flops": "FLOP-aware"}


def part_tables(results: Results, part: str) -> str:
    """Return the tables of a part: a row per workload, a column per model and memory size."""

    def share(*key: str) -> float:
        each = results["/".join([part, *key, "value"])]
        return each["hit_tokens"] / max(1, each["oracle_tokens"])

    known = {key: share(*key) for key in ratios(results, part, "lru", hits)}
    tables = [_table("Share of the oracle's hit tokens under `value`", known, "{:.0%}")]
    for other, name in OTHERS.items():
        tables.append(_table(f"Hit tokens over those of {name}", ratios(results, part, other, hits), lowest=True))
    for field, name in (("ttft_p50", "Median"), ("ttft_p90", "90th percentile of the")):
        found = ratios(results, part, "lru", lambda result, field=field: result[field])
        tables.append(_table(f"{name} time to the first token over LRU's", found, highest=True))
    return "\n".join(table for table in tables if table)


def _table(
    title: str, found: dict[Entry, float], form: str = "{:.2f}", lowest: bool = False, highest: bool = False
) -> str:
    if not found:
        return ""
    text = f"{title}:\n{_grid(found, form)}"
    for wanted, word, choose in ((lowest, "lowest", min), (highest, "highest", max)):
        if wanted:
            key = choose(found, key=lambda key: found[key])
            mean = geometric_mean(list(found.values()))
            text += f"\nGeometric mean of {len(found)}: **{mean:.2f}**; {word}: {found[key]:.3f} "
            text += f"({', '.join(key[:2])}, {float(key[2]):.0%}).\n"
    return text


def _grid(found: dict[Entry, float], form: str) -> str:
    columns = list(dict.fromkeys((model, share) for _, model, share in found))
    heads = [f"{model.split('-')[0]} {float(share):.0%}" for model, share in columns]
    rows = ["", "| workload | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(columns)]
    for workload in dict.fromkeys(workload for workload, _, _ in found):
        cells = [form.format(found[workload, *each]) if (workload, *each) in found else "" for each in columns]
        rows.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])
