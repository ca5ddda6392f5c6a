"""Traffic of quantised models: hits, drafts, preemptions and batches change no bit of an exact answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.engines import TINY, dummy_model, tokens
from tests.support.models.exact_traffic import ExactModel, check_reuse, compare_traffic, exact_model
from tests.support.models.oracle import Oracle
from tests.support.models.packed import ALL
from tests.support.models.quantised import FP8, quantise
from weft import LLM, SamplingParams
from weft.models.model import MatrixLayer

MXFP4 = {"quant_method": "mxfp4"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks and plain numbers in one matmul": ("qwen3_5", FP8["blocks"].config),
    "experts in blocks": ("qwen3_next", FP8["blocks"].config),
    "a scale for each output": ("nemotron_h", FP8["compressed-tensors, channels"].config),
    "four-bit experts": ("gpt_oss", MXFP4),
    "integers with zeros": ("qwen3_5", ALL["GPTQ, zeros"][0].config),
    "integers, experts too": ("qwen3_5_moe", ALL["compressed-tensors, zeros"][0].config),
    "bytes": ("qwen3_next", ALL["compressed-tensors, bytes"][0].config),
    "a factor for each output": ("nemotron_h", ALL["NVFP4, compressed-tensors"][0].config),
    "powers of two": ("lfm2", ALL["MXFP8, ModelOpt"][0].config),
    "integers beside plain experts": ("gpt_oss", ALL["GPTQ"][0].config),
    "rows in FP8, experts too": ("qwen3_next", FP8["blocks"].config),
    "rows in FP8, a scale for each output": ("nemotron_h", FP8["compressed-tensors, channels"].config),
}
DEFAULT = ("blocks and plain numbers in one matmul", "integers, experts too", "rows in FP8, experts too")
IN_FP8 = ("rows in FP8, experts too", "rows in FP8, a scale for each output")


def few_marked(kinds):
    """Return kinds: one of FP8, one of integers and one with rows in FP8 are tested by default."""
    return [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.families) for kind in kinds]


def model_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> ExactModel:
    family, stated = MODELS[kind]
    monkeypatch.setitem(TINY, kind, TINY[family].variant(published={"quantization_config": stated}))
    layers = [layer for layer in dummy_model(TINY[kind]).modules() if isinstance(layer, MatrixLayer)]
    assert any(part.dense is None for layer in layers for part in layer.stored_parts())
    return exact_model(kind, torch.float32, activations="fp8" if kind in IN_FP8 else "wide")


@pytest.mark.parametrize("kind", few_marked(MODELS))
def test_hits_drafts_and_preemptions_answer_as_lone_cold_runs(kind, monkeypatch):
    check_reuse(model_of(kind, monkeypatch), kind)


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_every_digest_of_random_traffic_is_that_of_a_lone_cold_run(kind, drafts, monkeypatch):
    compare_traffic(model_of(kind, monkeypatch), kind, 1 if drafts else 2, 4, drafts, threads=1)


SETTINGS = {"memory": "32MiB", "threads": 1, "max_length": 512, "progress": False, "dtype": "float32"}


def answers(place: Path, prompt: list[int], times: int = 1, **options: object) -> tuple[list[list[int]], list[int]]:
    """Return the answers to a prompt that is asked so often, and how many of its tokens were cached each time."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(place), **{**SETTINGS, **options}) as llm:
        found = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(times)]
    return [list(each.token_ids) for each in found], [each.cached_tokens for each in found]


@pytest.mark.thorough
def test_with_rows_in_fp8_tiers_are_shared_by_engines_that_round_alike_and_two_ranks_hit(tmp_path):
    folder, _ = quantise(Oracle(TINY["qwen3_5_moe"]).save(tmp_path / "full"), tmp_path, FP8["blocks"])
    prompt, tier = tokens(200, 3), {"disk": str(tmp_path / "tier"), "disk_size": "64MiB"}
    cold, [none] = answers(folder, prompt, activations="fp8", **tier)
    again, [cached] = answers(folder, prompt, activations="fp8", **tier)
    assert (none, cached, again) == (0, 192, cold)
    _, [cached] = answers(folder, prompt, **tier)
    assert cached == 0
    [first, second], [none, cached] = answers(folder, prompt, times=2, activations="fp8", tensor_parallel=2)
    assert (none, cached, second) == (0, 192, first)
