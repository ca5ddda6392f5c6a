"""What a server could tell the page: an outline of a large cache, and what many requests do."""

from __future__ import annotations

from typing import Any

Facts = dict[str, Any]


def outline_of(branches: int, cells: int) -> Facts:
    """Return the outline of a cache in which prefixes of this many cells share the first half of them."""
    half = 64 * (cells // 2)
    stem = branch_of("stem", None, 0, half)
    found = [branch_of(f"{number:016x}", "stem", half, 64 * cells) for number in range(branches - 1)]
    held = cells // 2 * branches
    return {
        "cell_tokens": 64,
        "clock": 9,
        "cells": {"device": {"held": held, "shown": min(held, 8192)}},
        "branches": [stem, *found],
    }


def branch_of(name: str, parent: str | None, first: int, end: int) -> Facts:
    points = [{"tokens": each, "origin": "prompt_end", "hits": each % 3} for each in range(first + 640, end + 1, 640)]
    return {
        "name": name, "parent": parent, "from": first, "to": end, "hits": 1, "running": 0, "age": 1, "retained": None,
        "points": points, "tenant": None, "tier": "device",
    }  # fmt: skip


MISS = {"reason": "never_computed", "why": "the next 64 tokens were not computed before", "at": 384, "matched": 384}
MISS |= {"reusable": 384, "lost": 0}


def batch_of(at: float, requests: int = 24, seconds: float = 40.0) -> Facts:
    """Return what `requests` did in the seconds before `at`: half of them ended, one was preempted, one still waits."""
    events: list[Facts] = []
    for number in range(requests):
        began = at - 1000 * seconds * (requests - number) / requests
        events += request_of(f"chatcmpl-{number:032x}", began, at, number)
    steps = [step_of(number, at - 1000 * seconds + 20 * number) for number in range(int(50 * seconds))]
    return {"at": at, "events": sorted(events, key=lambda each: each["at"]), "steps": steps, "lost": 0, "opening": True}


def request_of(name: str, began: float, until: float, number: int) -> list[Facts]:
    prompt, cached = 300 + 97 * (number % 9), 64 * (number % 5)
    facts = {"id": name, "tenant": f"{number % 3:064x}", "prompt": prompt}
    why = ("turn", "memory", "load", "prefix", "step")[number % 5]
    found: list[Facts] = [{"event": "waits", "at": began, "for": why, **facts}]
    time = began + 200 + 90 * (number % 4)
    if until - began < 1000:
        return found
    loaded = {"host": 0, "disk": 64 if why == "load" else 0, "remote": 0}
    start = {"cached": cached, "loaded": loaded, "miss": {**MISS, "at": cached}, "again": False}
    found.append({"event": "starts", "at": time, **facts, **start})
    for first in range(cached, prompt, 256):
        time += 350
        last = min(first + 256, prompt)
        found.append({"event": "computes", "id": name, "at": time, "from": first, "to": last, "of": prompt})
    tokens = 0
    while (time := time + 200) < min(until, began + 4000 + 900 * (number % 7)):
        drafts, accepted = 3 * (number % 3), (tokens // 7) % 3 * (number % 3)
        accepted = min(drafts, accepted)
        tokens += 9 + accepted
        counts = {"steps": 9, "tokens": 9 + accepted, "drafts": drafts, "accepted": accepted}
        found.append({"event": "decodes", "id": name, "at": time, "ms": 200.0, **counts})
        if number == 7 and time > began + 2000 and not any(each["event"] == "preempted" for each in found):
            found.append({"event": "preempted", "id": name, "at": time + 10})
            found.append({"event": "waits", "at": time + 10, "for": "memory", **facts})
            time += 700
            found.append({"event": "starts", "at": time, **facts, **start, "again": True})
    if time < until:
        found.append({"event": "ends", "id": name, "at": time, "reason": "stop", "tokens": tokens})
    return found


def step_of(number: int, at: float) -> Facts:
    prompt = 256 if number % 60 < 4 else 0
    rows = 6 + number // 200 % 7
    return {
        "number": number, "at": at, "ms": 8 + number % 5 + prompt / 16, "kind": "mixed" if prompt else "decode",
        "rows": rows, "tokens": rows + prompt, "prompt_tokens": prompt, "drafts": 4, "accepted": number % 4,
    }  # fmt: skip
