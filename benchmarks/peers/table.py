"""Format results: rates, ratios to Weft, and whether all engines gave the same answers."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.work import middle, shared_start

Run = dict[str, Any]
# Weft's rate should be at least this multiple of the other's: (alone, crowd).
GOALS = {"transformers": (1.5, 4.0), "llama.cpp": (0.7, 1.0)}
# Float32 answers that differ before this token probably come from different models.
MUST_AGREE = 4


def machine(threads: int) -> str:
    """Describe the run: date, processor, cores, threads, load before the start."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    load = os.getloadavg()[0]
    return f"{time.strftime('%Y-%m-%d %H:%M')}  {name}, {os.cpu_count()} cores, {threads} threads, load {load:.1f}"


def _rate(run: Run, engine: str, kind: str) -> float | None:
    return middle(run["engines"].get(engine, {}).get(kind, []))


def table(runs: list[Run]) -> str:
    """Return a table of median tokens per second, and Weft's multiple of every other engine."""
    lines = ["| model | precision | work | engine | tokens/s | Weft is |", "|---|---|---|---|---:|---:|"]
    for run in runs:
        for kind, title in (("single", "alone"), ("crowd", "crowd")):
            own = _rate(run, "weft", kind)
            for engine in run["engines"]:
                rate = _rate(run, engine, kind)
                if rate is None:
                    continue
                multiple = f"{own / rate:.2f}x" if own is not None and engine != "weft" else ""
                lines.append(f"| {run['model']} | {run['precision']} | {title} | {engine} | {rate:.1f} | {multiple} |")
    return "\n".join(lines)


def bounds(runs: list[Run], bytes_per_second: float) -> str:
    """Return a table of the tokens per second of a single stream that only reads its weights at the memory's rate."""
    lines = [
        "| model | precision | MB a token | tokens/s at most | of which Weft | transformers | at most ÷ transformers |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        most = bytes_per_second / run["weight_bytes"]
        rates = (_rate(run, engine, "single") for engine in ("weft", "transformers"))
        own, other = ("" if rate is None else f"{rate / most:.0%}" for rate in rates)
        other_rate = _rate(run, "transformers", "single")
        multiple = "" if other_rate is None else f"{most / other_rate:.2f}"
        megabytes = run["weight_bytes"] / 1e6
        name = f"| {run['model']} | {run['precision']} "
        lines.append(f"{name}| {megabytes:.0f} | {most:.1f} | {own} | {other} | {multiple} |")
    return "\n".join(lines)


def agreements(runs: list[Run]) -> str:
    """Report how many leading tokens each engine's answers share with those of the first engine."""
    lines = []
    for run in runs:
        present = {name: result for name, result in run["engines"].items() if result.get("single_tokens")}
        if len(present) < 2:
            continue
        first, *others = present
        for other in others:
            lone, crowd = _shared(present[first], present[other])
            verdict = ""
            if run["precision"] == "float32" and min(lone, *crowd, MUST_AGREE) < MUST_AGREE:
                verdict = "  DIFFERENT MODELS?"
            shown = f", crowd {min(crowd)} to {max(crowd)}" if crowd else ""
            lines.append(
                f"same first tokens, {run['model']} {run['precision']}, {first} and {other}: "
                f"alone {lone} of {len(present[first]['single_tokens'])}{shown}{verdict}"
            )
    return "\n".join(lines)


def _shared(first: Run, second: Run) -> tuple[int, list[int]]:
    lone = shared_start(first["single_tokens"], second["single_tokens"])
    return lone, [shared_start(a, b) for a, b in zip(first["crowd_tokens"], second["crowd_tokens"])]


def summary(runs: list[Run]) -> str:
    """Report every goal and whether it is met."""
    lines = []
    for run in runs:
        for engine, goals in GOALS.items():
            for kind, title, goal in zip(("single", "crowd"), ("alone", "crowd"), goals):
                own, other = _rate(run, "weft", kind), _rate(run, engine, kind)
                if own is None or other is None:
                    continue
                verdict = "met   " if own >= goal * other else "MISSED"
                name = f"{run['model']} {run['precision']} {title}"
                lines.append(f"{verdict}  {name:24}  {own / other:5.2f}x {engine}, goal {goal}x")
    return "\n".join(lines)
