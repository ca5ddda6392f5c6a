"""Engines with states in fewer bits: a cache hit has the bits of a cold run, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.models.engines import Ask, serve, tokens
from tests.support.models.exact_traffic import ExactModel, alone, compare_traffic, digesting, exact_model
from weft.memory.spec import RecurrentMemory

# A scan, a gated delta rule, one with decays by channel; a scan beside attention.
FAMILIES = ("nemotron_h", "qwen3_next", "kimi_linear", "falcon_h1")


def small_model(family: str, states: str = "int8", dtype: torch.dtype = torch.float32) -> ExactModel:
    found = exact_model(family, dtype, states=states)
    parts = {part.dtype for each in found.spec.memories if isinstance(each, RecurrentMemory) for part in each.state}
    assert states in parts
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("states", ["int8", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_traffic_has_the_bits_of_cold_runs(family: str, states: str) -> None:
    """With drafts in every second family."""
    drafts = FAMILIES.index(family) % 2 == 1
    assert compare_traffic(small_model(family, states), family, 2, 8, drafts, engines=2).digests > 0


def test_a_hit_has_the_bits_of_a_cold_run_of_any_tenant() -> None:
    found, prompt = small_model("falcon_h1"), tokens(70, 7)
    asks = [Ask([*prompt, number], digesting(1, 3), step=10 * number) for number in (3, 4)]
    engine = found.engine()
    answers = serve(engine, [*asks, *(replace(ask, salt=b"another", step=60) for ask in asks)])
    assert answers[1].report is not None
    assert answers[1].report.cached_tokens == 64
    cold = [alone(found, ask).digests for ask in asks]
    assert [answer.digests for answer in answers] == cold * 2
    # States of float32 give other bits: these were rounded.
    assert alone(exact_model("falcon_h1", torch.float32), asks[0]).digests != cold[0]


def test_engines_with_other_states_share_no_cells() -> None:
    specs = [small_model("falcon_h1", states).spec for states in ("int8", "bfloat16", "float32")]
    assert len({repr(spec) for spec in specs}) == 3
    assert specs[0].state_bytes < specs[1].state_bytes < specs[2].state_bytes
    assert repr(specs[2]) == repr(exact_model("falcon_h1", torch.float32).spec)
