"""Estimates how long a step takes: a roofline model with measured rates. Knows no policy.

A step costs the larger of its arithmetic and its memory traffic, plus its snapshot writes, plus a fixed cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft import builtin
from weft.base.errors import OptionError
from weft.memory.spec import MemorySpec

WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Achieved rates of a device, not those of its data sheet. The defaults are a share of an H200's."""

    flops: float = 4.5e14
    bytes: float = 3.3e12
    step_seconds: float = 1.0e-3


@dataclass(frozen=True, slots=True)
class TierRates:
    """Bytes per second, as measured on an H200 machine: pinned copies both ways, and its disk with direct access."""

    host: float = 55e9
    disk_read: float = 3.5e9
    disk_write: float = 2.3e9


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step. `pairs` counts (new token, earlier token); `read_bytes` is the memory that decodes read."""

    tokens: int
    pairs: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model in numbers: weights in total and per token, and the width of its attention over all layers."""

    spec: MemorySpec
    parameters: float
    active_parameters: float
    attention_width: int  # heads times their size, summed over attention layers
    rates: DeviceRates = DeviceRates()
    tiers: TierRates = TierRates()

    def seconds(self, work: Work) -> float:
        rates = self.rates
        flops = 2.0 * self.active_parameters * work.tokens + 4.0 * self.attention_width * work.pairs
        moved = self.weights_read(work.tokens) + work.read_bytes
        return rates.step_seconds + max(flops / rates.flops, moved / rates.bytes) + work.written_bytes / rates.bytes

    def weights_read(self, tokens: int) -> float:
        """Return the bytes of weights that the step's tokens need; with experts, more for every token."""
        share = self.active_parameters / self.parameters
        return WEIGHT_BYTES * self.parameters * (1.0 - (1.0 - share) ** tokens)

    @property
    def kv_bytes_per_token(self) -> float:
        return (self.spec.page_bytes + self.spec.window_page_bytes) / self.spec.cell


@lru_cache
def cost_model(name: str, states: str = "float32") -> CostModel:
    """Return the cost model of a packaged configuration (as for `--weights dummy`), or of a config.json."""
    # Tensors are needed only here, and these have no memory.
    from weft.models import configurations
    from weft.models.shapes import shape_of

    local = Path(builtin.place_of(name)).expanduser()
    place = local if local.exists() else configurations.find(name)
    if place is None:
        known = ", ".join([*configurations.names(), builtin.NAME])
        raise OptionError(f"model must be one of {known}, or a folder with a config.json, got {name!r}")
    found = shape_of(place if place.is_file() else place / "config.json", states=states)
    return CostModel(MemorySpec(found.memories), found.parameters, found.active_parameters, found.attention_width)


def calibrated(cost: CostModel, path: str | Path) -> CostModel:
    """Return the model with rates that match a result of `weft bench --json`.

    The arithmetic rate follows from the time to first token, the memory rate from the time per later token.
    """
    try:
        found = json.loads(Path(path).read_text())
        return replace(cost, rates=_fit(cost, found))
    except OSError as error:
        raise OptionError(f"cannot read calibrate {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"calibrate {path} is not a result of `weft bench --json`") from None


def _fit(cost: CostModel, found: Mapping[str, Any]) -> DeviceRates:
    prompts = found["completed"]
    prompt, answer = found["total_input_tokens"] / prompts, found["total_output_tokens"] / prompts
    batch = max(1, min(int(found["options"]["concurrency"]) or prompts, prompts))
    first, later = found["median_ttft_ms"] / 1000, found["median_tpot_ms"] / 1000
    # On average, a request of a batch waits for half of the others' prompts.
    share = 1.0 if batch == 1 else (batch + 1) / 2
    step = min(cost.rates.step_seconds, first / 4, later / 4)
    flops = 2.0 * cost.active_parameters * prompt + 4.0 * cost.attention_width * prompt**2 / 2
    held = cost.kv_bytes_per_token * (prompt + answer / 2) + cost.spec.state_bytes
    moved = cost.weights_read(batch) + batch * held
    return DeviceRates(share * flops / (first - step), moved / (later - step), step)
