"""What exact answers cost on a GPU, by family, and so whether `--exact auto` turns them on. Measured cells only.

`python -m benchmarks.exact` measures and prints a line for this table. It stands in the repository, because a
measurement at start would let the bits of an answer depend on noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The most that `--exact auto` lets an answer cost, in any column.
MOST = 0.03


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of exact steps over the usual ones, less one: decodes of 1, 32 and 128 rows, and a prompt of 8,192 tokens.

    None: not measured.
    """

    model: str
    measured: str  # date
    one_row: float | None
    rows_32: float | None
    rows_128: float | None
    prompt: float | None

    @property
    def columns(self) -> dict[str, float | None]:
        return {
            "1 row": self.one_row,
            "32 rows": self.rows_32,
            "128 rows": self.rows_128,
            "a prompt of 8,192 tokens": self.prompt,
        }


# By GPU, as its driver names it, and by `family_of` config.json. In bfloat16, all cells from one run.
COSTS: dict[tuple[str, str], Cost] = {
    ("NVIDIA H200", "lfm2"): Cost("lfm2-1.2b", "2026-11-17", 0.133, 0.065, 0.060, 0.095),
    ("NVIDIA H200", "nemotron_h"): Cost("nemotron-nano-9b-v2", "2026-11-17", 0.022, -0.046, -0.016, 0.007),
    ("NVIDIA H200", "qwen3_5_text"): Cost("qwen3.5-9b", "2026-11-17", 0.043, 0.011, 0.039, -0.021),
    ("NVIDIA H200", "qwen3_next"): Cost("qwen3-next-mini", "2026-11-17", 0.120, -0.026, 0.032, -0.049),
    ("NVIDIA H200", "gpt_oss"): Cost("gpt-oss-20b", "2026-11-17", 0.098, 0.020, 0.007, 0.004),
}


def family_of(config: Mapping[str, Any]) -> str:
    """Return the model_type of a configuration; models of Nemotron-H with experts are a family of their own.

    >>> family_of({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"})
    'nemotron_h'
    >>> family_of({"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E"})
    'nemotron_h with experts'
    >>> family_of({"model_type": "nemotron_h", "layers_block_type": ["attention", "moe"]})
    'nemotron_h with experts'
    """
    family = str(config.get("model_type"))
    letters, words = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    has_experts = (isinstance(letters, str) and "E" in letters) or (isinstance(words, list) and "moe" in words)
    return f"{family} with experts" if has_experts else family


def decide(device: str, family: str, dtype: str, conflict: str | None = None) -> tuple[bool, str]:
    """Return what `--exact auto` means for a family on a device, and why. `conflict` is an option that excludes it.

    >>> decide("cpu", "lfm2", "bfloat16")
    (False, 'off: its cost for lfm2 in bfloat16 on cpu was not measured')
    """
    cost = COSTS.get((device, family)) if dtype == "bfloat16" else None
    if cost is None:
        return False, f"off: its cost for {family} in {dtype} on {device} was not measured"
    missing = [name for name, found in cost.columns.items() if found is None]
    if missing:
        return False, f"off: its cost for {family} on {device} was not measured for {', '.join(missing)}"
    most, where = max((found, name) for name, found in cost.columns.items() if found is not None)
    said = f"it costs {cost.model} {most:+.1%} at {where} on {device}"
    if most > MOST:
        return False, f"off: {said}, more than {MOST:.0%}"
    return (True, f"on: {said}") if conflict is None else (False, f"off: {conflict}")
