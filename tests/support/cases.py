"""Which cases of a parametrised test run by default: of all families one for each mixer, of Triton kernels the first.

All others have a marker, and run with `pytest -m families` and `pytest -m kernels`, as `.ci/run` does. Planted bugs and
what needs a GPU are not touched. `conftest.py` applies these rules to what was collected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def family_of(values: dict[str, Any]) -> str | None:
    """Return the family that the values of a test's parameters name, if one does; variants follow a comma.

    >>> family_of({"depth": 1, "family": "granite, attention only"}), family_of({"name": "llama-guard"})
    ('granite', None)
    """
    found = [value.split(",")[0] for value in values.values() if isinstance(value, str)]
    return next((each for each in found if each in REPRESENTATIVES or each in OTHERS), None)


def markers_of(place: str, cases: Sequence[dict[str, Any]], name: str = "") -> list[str | None]:
    """Return the marker of each case of a test, by the values of its parameters. `place` is its file."""
    if any(word in f"{place} {name}" for word in ("planted", "caught", "be_seen", "is_seen", "noticed")):
        return [None] * len(cases)
    if place.startswith(INTERPRETED) and place not in NOT_INTERPRETED:
        return [None, *["kernels"] * (len(cases) - 1)]
    families = [family_of(values) for values in cases]
    if place in QUICK or not any(families):
        return [None] * len(cases)
    kept = set(REPRESENTATIVES).intersection(families) or {next(each for each in families if each)}
    return [None if family is None or family in kept else "families" for family in families]


def mark(items: Sequence[Any]) -> None:
    """Mark the collected cases that do not run by default."""
    tests: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("gpu") is None:
            place = Path(item.path).relative_to(ROOT).as_posix() if Path(item.path).is_relative_to(ROOT) else ""
            tests[place, item.nodeid.split("[")[0]].append(item)
    for (place, test), cases in tests.items():
        markers = markers_of(place, [item.callspec.params for item in cases], test.rpartition("::")[2])
        for item, marker in zip(cases, markers, strict=True):
            if marker is not None:
                item.add_marker(marker)
