"""Which cases of a parametrised test run by default: of all families one for each mixer, of Triton kernels the first.

Where those of a test take longer than `SECONDS`, every n-th runs, such that they do not; which one comes first depends
on the test's name, so that all mixers have their turn. All others have a marker, and run with `pytest -m families`,
`kernels` and `thorough`, as `.ci/run` does. Planted bugs and what needs a GPU are not touched. `conftest.py` applies
these rules to what was collected.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.support.costs import kept
from tests.support.fences import ROOT

# Short convolutions; Mamba2 beside attention; the gated delta rule with experts; windows; the delta rule by channel
# with latent attention and grouped experts.
REPRESENTATIVES = ("lfm2", "falcon_h1", "qwen3_next", "gemma3", "kimi_linear")
OTHERS = (
    "lfm2_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "nemotron_h", "granite_moe_hybrid", "granite", "llama",
    "mistral", "qwen3", "qwen3_moe", "gpt_oss", "lfm3", "qwen2", "phi3", "gemma2", "smollm3", "olmo2", "olmo3",
)  # fmt: skip
# Tests that take next to no time for a family.
QUICK = (
    "tests/models/test_config_bounds.py", "tests/models/test_contradictions.py", "tests/models/test_inventory.py",
    "tests/models/test_catalogue.py",
)  # fmt: skip
# Tests that run Triton kernels under the interpreter, by file or folder.
INTERPRETED = (
    "tests/kernels/cuda/", "tests/runner/cuda/", "tests/drafting/test_cuda_drafters.py",
    "tests/drafting/test_exact_drafts_cuda.py",
)  # fmt: skip
# Tests there that run no kernel, or next to nothing.
NOT_INTERPRETED = (
    "tests/kernels/cuda/test_cuda_launching.py", "tests/kernels/cuda/test_cuda_interpreter.py",
)  # fmt: skip
# A parametrised test takes about this long by default, as measured (`costs.py`).
SECONDS = 0.8
COSTS = kept()
# Tests of the whole engine, in which this holds for each family by itself: every mixer has at least one case.
WHOLE = ("tests/engine/test_sameness.py",)
# What a claim that a bug is noticed has in its name.
PLANTED = ("planted", "caught", "be_seen", "is_seen", "noticed", "would_show")
# Cases with these do not run by default anyway.
ELSEWHERE = ("slow", "gpu", "browser", "families", "kernels", "thorough")


def family_of(values: dict[str, Any]) -> str | None:
    """Return the family that the values of a test's parameters name, if one does; variants follow a comma.

    >>> family_of({"depth": 1, "family": "granite, attention only"}), family_of({"name": "llama-guard"})
    ('granite', None)
    """
    found = [value.split(",")[0] for value in values.values() if isinstance(value, str)]
    return next((each for each in found if each in REPRESENTATIVES or each in OTHERS), None)


def markers_of(
    place: str, cases: Sequence[dict[str, Any]], name: str = "", costs: Mapping[str, float] = COSTS
) -> list[str | None]:
    """Return the marker of each case of a test, by the values of its parameters. `place` is its file."""
    if any(word in f"{place} {name}" for word in PLANTED):
        return [None] * len(cases)
    if place.startswith(INTERPRETED) and place not in NOT_INTERPRETED:
        return [None, *["kernels"] * (len(cases) - 1)]
    families = [family_of(values) for values in cases]
    found: list[str | None] = [None] * len(cases)
    if place not in QUICK and any(families):
        kept = set(REPRESENTATIVES).intersection(families) or {next(each for each in families if each)}
        found = [None if family is None or family in kept else "families" for family in families]
    test = f"{place}::{name}"
    groups = families if place in WHOLE else [None] * len(cases)
    for group in set(groups):
        places = [each for each, family in enumerate(groups) if family == group]
        ours = [found[each] for each in places]
        every = ceil(ours.count(None) * costs.get(test, 0.0) / SECONDS)
        for each, marker in zip(places, some_of(ours, every, crc32(f"{test} {group}".encode())), strict=True):
            found[each] = marker
    return found


def some_of(markers: list[str | None], every: int, first: int = 0) -> list[str | None]:
    """Mark all but every n-th of the cases that have no marker, and at least one of them stays.

    >>> some_of([None, "families", None, None], 2)
    [None, 'families', 'thorough', None]
    >>> some_of([None, None, None], 3, first=7)
    ['thorough', None, 'thorough']
    """
    count, every = itertools.count(), max(1, min(every, markers.count(None)))
    return [each or (None if next(count) % every == first % every else "thorough") for each in markers]


def mark(items: Sequence[Any]) -> None:
    """Mark the collected cases that do not run by default."""
    tests: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ELSEWHERE)):
            place = Path(item.path).relative_to(ROOT).as_posix() if Path(item.path).is_relative_to(ROOT) else ""
            tests[place, item.nodeid.split("[")[0]].append(item)
    for (place, test), cases in tests.items():
        markers = markers_of(place, [item.callspec.params for item in cases], test.rpartition("::")[2])
        for item, marker in zip(cases, markers, strict=True):
            if marker is not None:
                item.add_marker(marker)
