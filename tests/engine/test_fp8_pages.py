"""Engines with keys and values in FP8: a cache hit has the bits of a cold run, whatever happens in between."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.engines import HYBRIDS
from tests.support.models.exact_traffic import ExactModel, compare_traffic, exact_model
from weft.base.errors import ModelError
from weft.memory.spec import AttentionMemory

# Full attention beside convolutions, windows, states, sinks; and a head of each size.
FAMILIES = ("lfm2", "gemma3", "qwen3_next", "falcon_h1", "gpt_oss")


def fp8_model(family: str, dtype: torch.dtype = torch.float32) -> ExactModel:
    found = exact_model(family, dtype, "fp8")
    attention = [each for each in found.spec.memories if isinstance(each, AttentionMemory)]
    assert attention
    assert all(memory.dtype == "fp8" for memory in attention)
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in FAMILIES]
    + [pytest.param(family, torch.bfloat16, marks=pytest.mark.thorough) for family in FAMILIES],
)
def test_traffic_has_the_bits_of_cold_runs(family: str, dtype: torch.dtype) -> None:
    """With drafts in every second family."""
    drafts = FAMILIES.index(family) % 2 == 1
    assert compare_traffic(fp8_model(family, dtype), family, 2, 4, drafts).digests > 0


def test_latents_are_refused() -> None:
    with pytest.raises(ModelError, match="kv_dtype: latents of this model's attention"):
        exact_model("kimi_linear", torch.float32, "fp8")
    assert "kimi_linear" in HYBRIDS
