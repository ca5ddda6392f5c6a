"""How long a step takes, from what it computes and moves: a roofline with measured rates. Knows no policy.

A step costs the larger of its arithmetic and its traffic, what it writes for others to resume from, and a fixed price.
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
class Rates:
    """What a device reaches, not what its sheet says. The defaults are a share of an H200's."""

    flops: float = 4.5e14
    bytes: float = 3.3e12
    step_seconds: float = 1.0e-3


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does. `pairs` counts (new token, earlier token); `read_bytes` is what decodes read of memory."""

    tokens: int
    pairs: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model in numbers: weights in all and per token, and the width of its attention over all layers."""

    spec: MemorySpec
    parameters: float
    active_parameters: float
    attention_width: int  # heads times their size, summed over attention layers
    rates: Rates = Rates()

    def seconds(self, work: Work) -> float:
        rates = self.rates
        flops = 2.0 * self.active_parameters * work.tokens + 4.0 * self.attention_width * work.pairs
        moved = self.weights_read(work.tokens) + work.read_bytes
        return rates.step_seconds + max(flops / rates.flops, moved / rates.bytes) + work.written_bytes / rates.bytes

    def weights_read(self, tokens: int) -> float:
        """Bytes of the weights that some token of the step needs: of experts, more with every token."""
        share = self.active_parameters / self.parameters
        return WEIGHT_BYTES * self.parameters * (1.0 - (1.0 - share) ** tokens)

    @property
    def kv_bytes_per_token(self) -> float:
        return (self.spec.page_bytes + self.spec.window_page_bytes) / self.spec.cell


@lru_cache
def cost_model(name: str) -> CostModel:
    """The model of a packaged configuration, by the names that `--weights dummy` knows, or of a config.json."""
    # Only here are tensors needed, and these have no memory.
    from weft.models import configurations
    from weft.models.shapes import shape_of

    local = Path(builtin.place_of(name)).expanduser()
    place = local if local.exists() else configurations.find(name)
    if place is None:
        known = ", ".join([*configurations.names(), builtin.NAME])
        raise OptionError(f"model must be one of {known}, or a folder with a config.json, got {name!r}")
    found = shape_of(place if place.is_file() else place / "config.json")
    return CostModel(MemorySpec(found.memories), found.parameters, found.active_parameters, found.attention_width)


def calibrated(cost: CostModel, path: str | Path) -> CostModel:
    """With rates that explain what `weft bench --json` measured: time to the first token, and time per later one.

    The arithmetic rate follows from the first, the rate of moving bytes from the second.
    """
    try:
        found = json.loads(Path(path).read_text())
        return replace(cost, rates=_fit(cost, found))
    except OSError as error:
        raise OptionError(f"cannot read calibrate {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"calibrate {path} is not a result of `weft bench --json`") from None


def _fit(cost: CostModel, found: Mapping[str, Any]) -> Rates:
    prompts = found["completed"]
    prompt, answer = found["total_input_tokens"] / prompts, found["total_output_tokens"] / prompts
    batch = max(1, min(int(found["options"]["concurrency"]) or prompts, prompts))
    first, later = found["median_ttft_ms"] / 1000, found["median_tpot_ms"] / 1000
    # Half the requests of a batch wait for half of the others' prompts.
    share = 1.0 if batch == 1 else (batch + 1) / 2
    step = min(cost.rates.step_seconds, first / 4, later / 4)
    flops = 2.0 * cost.active_parameters * prompt + 4.0 * cost.attention_width * prompt**2 / 2
    held = cost.kv_bytes_per_token * (prompt + answer / 2) + cost.spec.state_bytes
    moved = cost.weights_read(batch) + batch * held
    return Rates(share * flops / (first - step), moved / (later - step), step)
