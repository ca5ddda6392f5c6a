"""Tiny configurations of the families without recurrent layers: the usual ones, and odd ones."""

from __future__ import annotations

from tests.support.models.oracle import Tiny

COMMON = {
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA = Tiny("LlamaConfig", "LlamaForCausalLM", COMMON)
MISTRAL = Tiny("MistralConfig", "MistralForCausalLM", COMMON | {"head_dim": 24, "sliding_window": 70})
QWEN3 = Tiny("Qwen3Config", "Qwen3ForCausalLM", COMMON | {"head_dim": 32})
QWEN3_MOE = Tiny(
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    COMMON
    | {
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
)
GEMMA3 = Tiny(
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    COMMON
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
)
GPT_OSS = Tiny(
    "GptOssConfig",
    "GptOssForCausalLM",
    COMMON
    | {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    },
)
QWEN2 = Tiny("Qwen2Config", "Qwen2ForCausalLM", COMMON)
PHI3 = Tiny("Phi3Config", "Phi3ForCausalLM", COMMON | {"sliding_window": 70})
SMOLLM3 = Tiny("SmolLM3Config", "SmolLM3ForCausalLM", COMMON)
OLMO2 = Tiny("Olmo2Config", "Olmo2ForCausalLM", COMMON)
OLMO3 = Tiny(
    "Olmo3Config",
    "Olmo3ForCausalLM",
    COMMON | {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
)
GEMMA2 = Tiny(
    "Gemma2Config", "Gemma2ForCausalLM", COMMON | {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
)
PLAIN: dict[str, Tiny] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * pair for pair in range(6)],
    "long_factor": [1.5 + 0.7 * pair for pair in range(6)],
}
ODD_PLAIN: dict[str, Tiny] = {
    "llama, tied, biases, one kv head, llama3 rope": LLAMA.variant(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
        rope_parameters=LLAMA3_ROPE,
    ),
    "llama, no grouping, yarn in the old spelling": LLAMA.variant(
        published={
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "rope_scaling": {**YARN_ROPE, "type": "yarn", "rope_type": None},
        },
        num_key_value_heads=4,
        rope_parameters=YARN_ROPE,
    ),
    "mistral, window of 17": MISTRAL.variant(sliding_window=17),
    "mistral, window longer than everything": MISTRAL.variant(sliding_window=1000),
    "mistral, multimodal": Tiny(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": MISTRAL.settings | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"head_dim": 16, "model_type": "pixtral"},
            "image_token_index": 3,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2, windows in the later layers, tied, one kv head": QWEN2.variant(
        use_sliding_window=True, sliding_window=65, max_window_layers=1, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "qwen2, yarn": QWEN2.variant(rope_parameters=YARN_ROPE),
    "phi3, tied, part of each head, factors of a short context": PHI3.variant(
        tie_word_embeddings=True,
        sliding_window=None,
        original_max_position_embeddings=2048,
        rope_parameters=LONG_ROPE | {"factor": 3.0},
    ),
    "smollm3, windows without positions, untied, biases": SMOLLM3.variant(
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=17,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "olmo2, biases, no grouping, tied": OLMO2.variant(
        attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "olmo3, yarn of full layers in the old spelling": OLMO3.variant(
        published={
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_scaling": {**YARN_ROPE, "rope_theta": None},
            "layer_types": None,
        },
        num_hidden_layers=4,
        layer_types=None,
        rope_parameters={
            "full_attention": YARN_ROPE | {"rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "gemma2, no bounds, default layers, biases": GEMMA2.variant(
        published={"layer_types": None},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        sliding_window=70,
    ),
    "mistral, no window, linear rope": MISTRAL.variant(
        sliding_window=None, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    ),
    "qwen3, windows in the later layers, tied": QWEN3.variant(
        published={"layer_types": None, "sliding_window": 65},
        use_sliding_window=True,
        sliding_window=65,
        max_window_layers=1,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "qwen3_moe, dense layers, weights not renormalised": QWEN3_MOE.variant(
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[2], use_sliding_window=True, sliding_window=20
    ),
    "gemma3, softcap, old spelling, window of 70": GEMMA3.variant(
        published={
            "layer_types": None,
            "sliding_window_pattern": 3,
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 7000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=70,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
        },
    ),
    "gemma3, multimodal": Tiny(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": GEMMA3.variant(
                num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
            ).settings,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 3,
            "boi_token_index": 4,
            "eoi_token_index": 5,
        },
    ),
    "gpt_oss, window of 8, no biases, llama3 rope, narrow clamp": GPT_OSS.variant(
        attention_bias=False,
        sliding_window=8,
        num_key_value_heads=4,
        rope_parameters=LLAMA3_ROPE,
        swiglu_limit=0.8,
        swiglu_alpha=1.3,
    ),
}
