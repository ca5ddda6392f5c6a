"""The model's shape: Qwen3.5's text architecture, gated delta layers and full attention three to one, and small."""

from __future__ import annotations

from typing import Any

from weft_training.tokenizer import VOCABULARY

LAYERS = 12
CONTEXT = 4096


def configuration(end_token: int, over_token: int) -> dict[str, Any]:
    """As transformers' Qwen3_5TextConfig takes it: about 24 million parameters."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 384,
        "intermediate_size": 832,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (LAYERS // 4),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": over_token,
    }
