"""Families without recurrent layers equal their public implementation."""

from __future__ import annotations

import pytest

from tests.oracle import Tiny, assert_parity, make_pair

TOKENS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA = Tiny("LlamaConfig", "LlamaForCausalLM", COMMON)
MODELS = {"llama": LLAMA}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_answers_equal_the_public_implementation(name, tmp_path):
    assert_parity(make_pair(MODELS[name], tmp_path))
