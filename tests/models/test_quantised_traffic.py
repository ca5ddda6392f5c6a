"""Traffic of quantised models: hits, drafts, preemptions and batches change no bit of an exact answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models.engines import TINY, dummy_model
from tests.support.models.exact_traffic import check_traffic
from tests.support.models.packed import ALL
from tests.support.models.quantised import FP8
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
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_every_digest_is_that_of_a_lone_cold_run(kind, seed, monkeypatch):
    """With drafts if the seed is odd."""
    family, stated = MODELS[kind]
    monkeypatch.setitem(TINY, kind, TINY[family].variant(published={"quantization_config": stated}))
    layers = [layer for layer in dummy_model(TINY[kind]).modules() if isinstance(layer, MatrixLayer)]
    assert any(part.dense is None for layer in layers for part in layer.stored_parts())
    check_traffic(kind, torch.float32, seed=seed, count=4)
