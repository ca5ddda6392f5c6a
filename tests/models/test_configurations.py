"""Packaged configurations are those of the public models, and are found by name where weights are random."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.operations import CPU
from weft.base.errors import ModelError
from weft.memory.spec import MemorySpec
from weft.models import configurations
from weft.models.config import read_config, text_part
from weft.models.finding import find_checkpoint
from weft.models.weights import build

# Parameters of the language models, as their publishers count them (without image encoders and draft heads).
PARAMETERS = {
    "falcon-h1-7b": 7.59e9,
    "gemma-2-9b": 9.24e9,
    "gemma-3-12b": 11.77e9,
    "gpt-oss-20b": 20.9e9,
    "granite-4.0-h-small": 32.2e9,
    "granite-4.0-h-tiny": 6.94e9,
    "kimi-linear-48b-a3b": 49.1e9,
    "lfm2-1.2b": 1.17e9,
    "lfm2-8b-a1b": 8.34e9,
    "lfm3-1.7b": 1.77e9,  # a gate of each head is held for every channel of it: 0.04e9 more than stored
    "mistral-small-3.1-24b": 23.57e9,
    "nemotron-nano-9b-v2": 8.89e9,
    "olmo-2-7b": 7.3e9,
    "olmo-3-7b": 7.3e9,
    "olmo-hybrid-7b": 7.43e9,  # as its public implementation counts the default configuration
    "phi-4": 14.66e9,
    "qwen2.5-7b": 7.62e9,
    "qwen3-next-mini": 6.3e9,  # nobody's: Qwen3-Next's layers, half as many, with an eighth of the experts
    "qwen3.5-35b-a3b": 34.7e9,
    "qwen3.5-9b": 8.95e9,
    "smollm3-3b": 3.08e9,
}
# Bytes of one checkpoint in MB: float32 matrices, windows of convolutions in bfloat16.
STATE_MEGABYTES = {"nemotron-nano-9b-v2": 143.6, "lfm2-1.2b": 0.082, "qwen3-next-mini": 38.6, "gemma-3-12b": 0.0}


@pytest.mark.parametrize("name", configurations.names())
def test_a_packaged_configuration_has_the_size_of_its_model(name: str) -> None:
    file = configurations.find(name)
    assert file is not None
    model = build(text_part(read_config(file)), torch.bfloat16, "meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.02)
    if name in STATE_MEGABYTES:
        assert MemorySpec(model.memories(CPU)).state_bytes / 1e6 == pytest.approx(STATE_MEGABYTES[name], rel=0.01)


def test_every_model_that_is_counted_is_packaged() -> None:
    assert sorted(PARAMETERS) == configurations.names()


def test_a_name_finds_its_configuration_where_weights_are_random() -> None:
    assert find_checkpoint("Nemotron-Nano-9B-v2", with_weights=False) == configurations.find("nemotron-nano-9b-v2")


def test_a_name_without_weights_says_how_to_run_it() -> None:
    with pytest.raises(ModelError, match="add --weights dummy"):
        find_checkpoint("lfm2-1.2b", with_weights=True)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"lfm2-1\.2b, lfm2-8b-a1b, lfm3-1\.7b, mistral-small"):
        find_checkpoint("lfm4", with_weights=False)
