"""Engines with keys and values in eight bits: a cache hit has the bits of a cold run, whatever happens in between."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.engines import HYBRIDS
from tests.support.models.exact_traffic import ExactModel, compare_traffic, exact_model
from weft.base.errors import ModelError
from weft.memory.spec import AttentionMemory

# Full attention beside convolutions, windows, states, sinks; and a head of each size.
FAMILIES = ("lfm2", "gemma3", "qwen3_next", "falcon_h1", "gpt_oss")


def coded_model(family: str, kind: str, dtype: torch.dtype = torch.float32) -> ExactModel:
    found = exact_model(family, dtype, kind)
    attention = [each for each in found.spec.memories if isinstance(each, AttentionMemory)]
    assert attention
    assert all(memory.dtype == kind for memory in attention)
    return found


CASES = [
    (family, kind, dtype)
    for kind in ("fp8", "int8")
    for dtype in (torch.float32, torch.bfloat16)
    for family in FAMILIES
]


@pytest.mark.parametrize(("family", "kind", "dtype"), CASES)
def test_traffic_has_the_bits_of_cold_runs(family: str, kind: str, dtype: torch.dtype) -> None:
    """With drafts in every second family."""
    drafts = FAMILIES.index(family) % 2 == 1
    assert compare_traffic(coded_model(family, kind, dtype), family, 2, 4, drafts).digests > 0


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_latents_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="kv_dtype: latents of this model's attention"):
        exact_model("kimi_linear", torch.float32, kind)
    assert "kimi_linear" in HYBRIDS
