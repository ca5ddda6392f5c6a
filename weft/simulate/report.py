"""Results of a run, for people and for programs: a table, an explanation of the misses, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.base.errors import OptionError
from weft.memory.misses import ranked_misses
from weft.simulate.found import Found

GIB = 1 << 30


def summary(found: Found) -> dict[str, Any]:
    """Return the numbers of a run, without its course."""
    kept: Mapping[str, int] = found.stats["kept"]
    requests = max(1, found.requests)
    return {
        "requests": found.requests,
        "refused": found.refused,
        "failed": found.failed,
        "not_served": not_served(found),
        "prompt_tokens": found.prompt_tokens,
        "answer_tokens": found.answer_tokens,
        "hit_tokens": found.hit_tokens,
        "hit_rate": found.hit_tokens / max(1, found.prompt_tokens),
        "oracle_tokens": found.oracle_tokens,
        "oracle_share": None if found.oracle_tokens is None else found.hit_tokens / max(1, found.oracle_tokens),
        "snapshots_per_request": sum(n for origin, n in kept.items() if origin != "candidate") / requests,
        "candidates_per_request": found.stats["candidates"]["written"] / requests,
        "candidates": found.stats["candidates"],
        "candidate_gib_written": found.stats["candidates"]["written_bytes"] / GIB,
        "candidate_gib_held": found.stats["candidates"]["held_bytes"] / GIB,
        "ttft_seconds": {f"p{share}": found.first_token(share / 100) for share in (50, 90, 99)},
        "seconds": found.seconds,
        "busy_seconds": found.busy_seconds,
        "imbalance": found.imbalance if found.replicas else None,
        "tokens_per_second": (found.prompt_tokens + found.answer_tokens) / max(found.seconds, 1e-9),
        "tokens_per_busy_second": (found.prompt_tokens + found.answer_tokens) / max(found.busy_seconds, 1e-9),
        "most_bytes": {kind: max(used[kind] for _, used in found.course) for kind in _kinds(found)},
        "tiers": {name: _tier(each) for name, each in found.stats.get("tiers", {}).items()},
        "misses": ranked_misses(found.stats["misses"], found.stats["lost_tokens"]),
    }


def _tier(stats: Mapping[str, float]) -> dict[str, float]:
    """Return what one tier has moved."""
    return {name: stats[name] for name in TIER_NUMBERS}


def _kinds(found: Found) -> list[str]:
    return list(found.course[0][1]) if found.course else []


ROWS = (
    ("Requests", "requests", "d"),
    ("Refused", "refused", "d"),
    ("Failed", "failed", "d"),
    ("Prompt tokens", "prompt_tokens", ",d"),
    ("Hit tokens", "hit_tokens", ",d"),
    ("Token hit rate", "hit_rate", ".1%"),
    ("Share of the oracle", "oracle_share", ".1%"),
    ("Snapshots per request", "snapshots_per_request", ".2f"),
    ("Candidates per request", "candidates_per_request", ".2f"),
    ("Candidates written, GiB", "candidate_gib_written", ",.2f"),
    ("... still held at the end, GiB", "candidate_gib_held", ",.2f"),
    ("Simulated seconds", "seconds", ",.0f"),
    ("Device busy, seconds", "busy_seconds", ",.0f"),
    ("Tokens per busy second", "tokens_per_busy_second", ",.0f"),
)

TIER_NUMBERS = ("loaded_tokens", "loaded_bytes", "saved_bytes", "unsaved", "used_bytes")
FLEET_ROWS = (("Busiest replica / average", "imbalance", ".2f"),)


def table(rows: Mapping[str, Found]) -> str:
    """Return a table with a column for every policy; below it, why requests were not served."""
    summaries = {name: summary(found) for name, found in rows.items()}
    lines = ["".join([f"{'':<28}", *(f"{name:>16}" for name in summaries)])]
    fleet = any(found.replicas for found in rows.values())
    for label, name, form in ROWS + FLEET_ROWS * fleet:
        lines.append(_line(label, [each[name] for each in summaries.values()], form))
    for share in ("p50", "p90", "p99"):
        values = [1000 * each["ttft_seconds"][share] for each in summaries.values()]
        lines.append(_line(f"Time to first token, {share}, ms", values, ",.0f"))
    for kind in _kinds(next(iter(rows.values()))):
        values = [each["most_bytes"][kind] / GIB for each in summaries.values()]
        lines.append(_line(f"Peak memory, {kind}, GiB", values, ",.2f"))
    for tier in summaries[next(iter(rows))]["tiers"]:
        tiers = [each["tiers"][tier] for each in summaries.values()]
        lines.append(_line(f"Tokens loaded from {tier}", [int(each["loaded_tokens"]) for each in tiers], ",d"))
        lines.append(_line(f"... GiB loaded, {tier}", [each["loaded_bytes"] / GIB for each in tiers], ",.2f"))
        lines.append(_line(f"... GiB saved, {tier}", [each["saved_bytes"] / GIB for each in tiers], ",.2f"))
    for name, each in summaries.items():
        lines += [f"{name}: {sentence}" if len(rows) > 1 else sentence for sentence in each["not_served"]]
    return "\n".join(lines)


def _line(label: str, values: list[Any], form: str) -> str:
    cells = ["-" if value is None else format(value, form) for value in values]
    return "".join([f"{label:<28}", *(f"{cell:>16}" for cell in cells)])


def not_served(found: Found) -> list[str]:
    """Return a sentence for every reason why requests were not served, the most common first."""
    large, long = found.too_large, found.too_long
    too_large = f"refused: they need more than {_size(large.bound)} even when alone; the longest, "
    too_large += f"of {large.tokens:,d} tokens, needs about {_size(large.most)}; raise --memory"
    too_long = f"refused: they exceed {long.bound:,d} tokens; the longest has {long.tokens:,d}; raise --max-length"
    failed = "failed: memory ran out while they ran or waited; raise --memory"
    reasons = [(large.requests, too_large), (long.requests, too_long), (found.failed, failed)]
    total = found.requests + found.refused + found.failed
    return [f"{count:,d} of {total:,d} requests {why}" for count, why in sorted(reasons, reverse=True) if count]


def _size(size_bytes: int) -> str:
    """Format bytes for people.

    >>> _size(3 << 30), _size(53_000_000)
    ('3.00 GiB', '50.5 MiB')
    """
    return f"{size_bytes / GIB:,.2f} GiB" if size_bytes >= GIB else f"{size_bytes / (1 << 20):,.1f} MiB"


def explained(found: Found, name: str | None = None) -> str:
    """Return the reasons for misses, most expensive first; why requests failed; and the hits of kept states."""
    lines = [f"Why not more was reused{f' ({name})' if name else ''}:", f"{'tokens':>14} {'lookups':>9}"]
    for each in ranked_misses(found.stats["misses"], found.stats["lost_tokens"]):
        lines.append(f"{each['lost_tokens']:>14,d} {each['lookups']:>9,d}  {each['reason']}: {each['sentence']}")
    lines += not_served(found)
    lines += ["", "States kept, and their hits:", f"{'kept':>14} {'hits':>9} {'tokens hit':>14}"]
    for origin, kept in found.stats["kept"].items():
        hits, tokens = found.stats["hits"][origin], found.stats["hit_tokens"][origin]
        if kept or hits:
            lines.append(f"{kept:>14,d} {hits:>9,d} {tokens:>14,d}  {origin}")
    return "\n".join(lines)


def write(path: str, options: Any, rows: Mapping[str, Found]) -> None:
    found = {
        name: summary(each)
        | {
            "stats": each.stats,
            "course": [{"seconds": seconds, "bytes": used} for seconds, used in each.course],
        }
        for name, each in rows.items()
    }
    try:
        Path(path).write_text(json.dumps({"options": asdict(options), "runs": found}, indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"cannot write json {path}: {error.strerror}") from None
