"""Engines in exact mode on a GPU: every digest of random traffic is that of a lone, cold run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.kernels.gpu_memory import ARENA_BYTES
from tests.support.models.cuda_engines import few_layers, for_each, held, load, load_tiny, make, packaged
from tests.support.models.engines import FAMILIES
from tests.support.models.exact_traffic import Served, compare_traffic
from weft import LLM
from weft.engine.loop import Engine
from weft.memory.spec import MemorySpec

pytestmark = pytest.mark.gpu

# Tokens of traffic for each model, and the first seed: processes with seeds far apart compare different traffic.
TOKENS = int(os.environ.get("WEFT_EXACT_TOKENS", "4000"))
FIRST_SEED = int(os.environ.get("WEFT_EXACT_SEED", "0"))
SMALL_STATES = ("nemotron_h", "qwen3_next", "kimi_linear", "falcon_h1")
PUBLISHED = ("lfm2-1.2b", "nemotron-nano-9b-v2", "qwen3.5-9b", "gpt-oss-20b")


@dataclass(frozen=True)
class OnGpu:
    llm: LLM

    @property
    def spec(self) -> MemorySpec:
        return self.llm.engine.ledger.spec

    def engine(self, memory_bytes: int = 0, **settings: Any) -> Engine:
        most = self.llm.engine.config.memory_bytes
        settings["max_tokens_per_step"] = min(512, settings.get("max_tokens_per_step", 512))
        return make(self.llm, min(memory_bytes or most, most), exact=True, **settings)


@pytest.fixture(autouse=True)
def _a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def compare(name: str, found: OnGpu) -> None:
    """With drafts if the seed is odd."""
    served, seed = Served(), FIRST_SEED
    while served.tokens < TOKENS:
        served = served.more(compare_traffic(found, name, seed, 6, drafts=seed % 2 == 1, engines=2))
        seed += 1
    print(f"{name}: {served}, seeds {FIRST_SEED} to {seed - 1}")


@pytest.mark.parametrize("family", for_each(FAMILIES, "tiny {} exact"))
def test_every_digest_on_a_gpu_is_that_of_a_lone_cold_run(family: str) -> None:
    compare(
        family, OnGpu(held(f"tiny {family} exact", lambda: load_tiny(family, "bfloat16", exact=True, draft="suffix")))
    )


@pytest.mark.parametrize("family", for_each(("lfm2", "qwen3_5", "gemma3"), "tiny {} exact fp8"))
def test_every_digest_over_pages_in_fp8_is_that_of_a_lone_cold_run(family: str) -> None:
    def make_it() -> LLM:
        return load_tiny(family, "bfloat16", exact=True, draft="suffix", kv_dtype="fp8")

    compare(family, OnGpu(held(f"tiny {family} exact fp8", make_it)))


@pytest.mark.parametrize("family", for_each(SMALL_STATES, "tiny {} exact int8 states"))
def test_every_digest_over_states_in_fewer_bits_is_that_of_a_lone_cold_run(family: str) -> None:
    def make_it() -> LLM:
        return load_tiny(family, "bfloat16", exact=True, draft="suffix", state_dtype="int8")

    compare(family, OnGpu(held(f"tiny {family} exact int8 states", make_it)))


@pytest.mark.parametrize("name", for_each(PUBLISHED))
def test_every_digest_of_a_published_shape_is_that_of_a_lone_cold_run(name: str) -> None:
    llm = held(
        f"exact {name}", lambda: load(few_layers(packaged(name)), "bfloat16", ARENA_BYTES, exact=True, draft="suffix")
    )
    compare(name, OnGpu(llm))
