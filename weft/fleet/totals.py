"""Facts, counters and cache reports of several engines as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from weft.backends.backend import ModelInfo

# Facts that must be the same for all members, or answers would depend on the member that gives them.
SAME = ("name", "architecture", "dtype", "vocab_size", "max_length")
SAME_SETTINGS = ("exact", "form", "digest", "quantize", "quantize_head", "activations")
# Numbers that describe one unit or one engine: a sum of them means nothing.
NOT_SUMMED = {"unit_bytes", "slab_bytes", "cell_tokens", "load_bytes_per_second", "prefill_tokens_per_second"}


def difference(one: ModelInfo, other: ModelInfo) -> str | None:
    """Return how two engines differ in what must be the same; None if they do not."""
    facts = [(name, getattr(one, name), getattr(other, name)) for name in SAME]
    facts += [(name, one.settings.get(name), other.settings.get(name)) for name in SAME_SETTINGS]
    found = next((fact for fact in facts if fact[1] != fact[2]), None)
    return None if found is None else f"{found[0]} is {found[2]!r} instead of {found[1]!r}"


def total_info(infos: Sequence[ModelInfo]) -> ModelInfo:
    """Return the facts of a fleet: memory and sequences of all, but the longest sequence that fits into any one."""
    one_engine = ("role", "transfer")
    return replace(
        infos[0],
        settings={name: value for name, value in infos[0].settings.items() if name not in one_engine},
        memory_bytes=sum(info.memory_bytes for info in infos),
        memory_tokens=min(info.memory_tokens for info in infos),
        max_sequences=sum(info.max_sequences for info in infos),
    )


def summed(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of counters by name, at every level; of what is not a counter, the first value.

    >>> summed([{"open": 1, "units": {"page": 2}, "slab_bytes": 8}, {"open": 2, "units": {"page": 3}, "slab_bytes": 8}])
    {'open': 3, 'units': {'page': 5}, 'slab_bytes': 8}
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table[name] for table in tables if name in table]
        if name not in NOT_SUMMED and all(isinstance(value, Mapping) for value in values):
            found[name] = summed(values)
        elif name not in NOT_SUMMED and all(_is_number(value) for value in values):
            found[name] = sum(values)
        else:
            found[name] = values[0]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged_reports(reports: Mapping[str, Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """Return the cache reports of members as one: sums, the prefixes that saved most, and who holds each of them."""
    prefixes: dict[str, dict[str, Any]] = {}
    for member, report in reports.items():
        for prefix in report.get("prefixes", ()):
            held = prefixes.setdefault(prefix["name"], {"name": prefix["name"], "tokens": prefix["tokens"], "hits": 0})
            held["hits"] += prefix["hits"]
            held["saved_tokens"] = held.get("saved_tokens", 0) + prefix["saved_tokens"]
            held.setdefault("replicas", {})[member] = prefix
    largest = sorted(prefixes.values(), key=lambda prefix: -prefix["saved_tokens"])[:limit]
    listed = ("prefixes", "misses", "tenants", "branches")
    rest = [{name: report[name] for name in report if name not in listed} for report in reports.values()]
    replicas = {member: {"cached_tokens": report.get("cached_tokens", 0)} for member, report in reports.items()}
    misses = sorted(_merged(reports, "misses", "reason"), key=lambda miss: -miss.get("lost_tokens", 0))
    tenants = sorted(_merged(reports, "tenants", "digest"), key=lambda tenant: -tenant.get("tokens", 0))
    found = summed(rest) | {"misses": misses, "tenants": tenants, "replicas": replicas, "prefixes": largest}
    branches = [each | {"replica": name} for name, report in reports.items() for each in report.get("branches", ())]
    return found | {"branches": branches} if branches else found


def _merged(reports: Mapping[str, Mapping[str, Any]], table: str, name: str) -> list[dict[str, Any]]:
    """Return a table of all reports as one, with the numbers of rows that have the same name added up."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports.values():
        for row in report.get(table, ()):
            known = found.setdefault(row[name], {})
            for column, value in row.items():
                known[column] = known.get(column, 0) + value if _is_number(value) else known.get(column, value)
    return list(found.values())
