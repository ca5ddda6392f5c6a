"""Tiny configurations of the hybrid families: the usual ones, and odd ones that published models may yet have.

Values only: what a configuration file would say, and the class of the public implementation that reads it.
"""

from __future__ import annotations

from importlib.metadata import version

from tests.support.models.oracle import Tiny

TOKENS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


COMMON = TOKENS | {"hidden_size": 64, "max_position_embeddings": 2048, "num_attention_heads": 4}
# Before version 5.23, the public implementation of Granite normalises its groups together. Here and in other engines,
# each is normalised by itself.
GRANITE_GROUPS = 2 if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23) else 1
CONV_AND_ATTENTION = ["conv", "full_attention", "conv", "full_attention"]
DELTA_AND_ATTENTION = ["linear_attention", "linear_attention", "full_attention"]

LFM2 = Tiny(
    "Lfm2Config",
    "Lfm2ForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "conv_L_cache": 3,
        "layer_types": CONV_AND_ATTENTION,
    },
)
LFM2_MOE = Tiny(
    "Lfm2MoeConfig",
    "Lfm2MoeForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": CONV_AND_ATTENTION,
    },
)
LFM3 = Tiny(
    "Lfm3Config",
    "Lfm3ForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "conv_L_cache": 7,
        "sliding_window": 20,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
)
DELTA = COMMON | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": DELTA_AND_ATTENTION,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_NEXT = Tiny("Qwen3NextConfig", "Qwen3NextForCausalLM", DELTA | EXPERTS | {"intermediate_size": 96})
QWEN3_5 = Tiny("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA | {"intermediate_size": 96})
QWEN3_5_MOE = Tiny("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", DELTA | EXPERTS)
# As model cards describe it for long texts; here the trained context is short.
QWEN3_5_YARN = QWEN3_5.variant(
    rope_parameters={
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
)
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
QWEN3_5_MULTIMODAL = Tiny(
    "Qwen3_5Config",
    "Qwen3_5ForConditionalGeneration",
    {"text_config": QWEN3_5.settings, "vision_config": VISION, "image_token_id": 3, "video_token_id": 4},
)
QWEN3_5_MOE_MULTIMODAL = Tiny(
    "Qwen3_5MoeConfig",
    "Qwen3_5MoeForConditionalGeneration",
    {"text_config": QWEN3_5_MOE.settings, "vision_config": VISION, "image_token_id": 3, "video_token_id": 4},
)
OLMO_HYBRID = Tiny(
    "OlmoHybridConfig",
    "OlmoHybridForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": DELTA_AND_ATTENTION,
        # As published: without positions.
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
)
KIMI_LINEAR = Tiny(
    "KimiLinearConfig",
    "KimiLinearForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "layer_types": DELTA_AND_ATTENTION,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
    },
)
NEMOTRON_H = Tiny(
    "NemotronHConfig",
    "NemotronHForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        # The public implementation clamps the time step to this while it reads a prompt, and only then.
        "time_step_min": 1e-12,
    },
)
FALCON_H1 = Tiny(
    "FalconH1Config",
    "FalconH1ForCausalLM",
    COMMON
    | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.05],
        "mlp_multipliers": [0.9, 1.1],
    },
)
GRANITE = Tiny(
    "GraniteMoeHybridConfig",
    "GraniteMoeHybridForCausalLM",
    COMMON
    | {
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
)

HYBRIDS: dict[str, Tiny] = {
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": LFM3,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "olmo_hybrid": OLMO_HYBRID,
    "kimi_linear": KIMI_LINEAR,
    "nemotron_h": NEMOTRON_H,
    "falcon_h1": FALCON_H1,
    "granite_moe_hybrid": GRANITE,
}

ODD_HEADS = {"mamba_n_heads": 5, "mamba_d_head": 24, "mamba_d_ssm": 120, "mamba_n_groups": 1}
ODD_HYBRIDS: dict[str, Tiny] = {
    "lfm2, adjusted feed-forward, conv bias and width 4, untied": LFM2.variant(
        intermediate_size=150,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=24,
        block_ffn_dim_multiplier=1.3,
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "lfm2, old spelling, width 2": LFM2.variant(
        published={
            "layer_types": None,
            "full_attn_idxs": [1, 3],
            "intermediate_size": 7,
            "block_ff_dim": 96,
            "tie_word_embeddings": None,
            "tie_embedding": True,
            "rope_parameters": None,
            "rope_theta": 10000.0,
        },
        conv_L_cache=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "lfm3, as released: a part that is not read": LFM3.variant(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }
    ),
    "lfm3, no gates, no norms after, biases, width 3, untied": LFM3.variant(
        published={"layer_types": None, "rope_parameters": None},
        layer_types=None,
        rope_parameters=None,
        use_attention_gate=False,
        use_sandwich_norm=False,
        attention_bias=True,
        conv_bias=True,
        conv_L_cache=3,
        tie_word_embeddings=False,
    ),
    "lfm2_moe, no expert bias, weights not normalised": LFM2_MOE.variant(
        use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5, conv_L_cache=2
    ),
    "qwen3_next, three value heads per key head, dense layer, tied": QWEN3_NEXT.variant(
        published={"layer_types": None, "full_attention_interval": 3},
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=8,
        linear_conv_kernel_dim=2,
        mlp_only_layers=[0],
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "qwen3_next, equal heads, width 3, every second layer sparse": QWEN3_NEXT.variant(
        linear_num_value_heads=2, linear_value_head_dim=24, linear_conv_kernel_dim=3, decoder_sparse_step=2
    ),
    "qwen3_5, multimodal": QWEN3_5_MULTIMODAL,
    "qwen3_5, attention bias, tied": QWEN3_5.variant(attention_bias=True, tie_word_embeddings=True),
    "qwen3_5_moe, multimodal": QWEN3_5_MOE_MULTIMODAL,
    "qwen3_5, yarn beside sections": QWEN3_5_YARN,
    "qwen3_5_moe, linear beside sections": QWEN3_5_MOE.variant(
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    ),
    "olmo_hybrid, rotated, correction of one at most, default sizes, tied": OLMO_HYBRID.variant(
        linear_allow_neg_eigval=False,
        linear_key_head_dim=None,
        linear_value_head_dim=None,
        linear_num_key_heads=None,
        linear_num_value_heads=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=True,
        linear_conv_kernel_dim=2,
        tie_word_embeddings=True,
    ),
    "kimi_linear, published spelling, expert groups, two shared experts, width 3": KIMI_LINEAR.variant(
        published={
            "layer_types": None,
            "mlp_layer_types": None,
            "linear_num_heads": None,
            "linear_head_dim": None,
            "linear_conv_kernel_dim": None,
            "first_k_dense_replace": 2,
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
            "linear_attn_config": {
                "full_attn_layers": [1, 3],
                "kda_layers": [2],
                "num_heads": 3,
                "head_dim": 12,
                "short_conv_kernel_size": 3,
            },
        },
        layer_types=["full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense", "sparse"],
        linear_num_heads=3,
        linear_head_dim=12,
        linear_conv_kernel_dim=3,
        num_shared_experts=2,
        num_expert_group=4,
        topk_group=2,
        moe_renormalize=False,
        routed_scaling_factor=1.3,
    ),
    "nemotron_h, pattern, expert groups, no conv bias": NEMOTRON_H.variant(
        published={"layers_block_type": None, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
        n_group=4,
        topk_group=2,
        use_conv_bias=False,
        conv_kernel=3,
        routed_scaling_factor=2.5,
    ),
    "nemotron_h, latent experts, biases, old names of layers": NEMOTRON_H.variant(
        published={"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
        moe_latent_size=24,
        use_bias=True,
        mlp_bias=True,
        norm_topk_prob=False,
        n_groups=4,
    ),
    "falcon_h1, tied, dt limits": FALCON_H1.variant(
        tie_word_embeddings=True, time_step_limit=[0.03, 0.5], mamba_conv_bias=False
    ),
    "falcon_h1, state of 24": FALCON_H1.variant(mamba_d_state=24),
    "falcon_h1, wide convolution": FALCON_H1.variant(mamba_d_conv=5),
    "falcon_h1, narrow convolution": FALCON_H1.variant(mamba_d_conv=2),
    "falcon_h1, norm after gate, bias of Mamba2 alone": FALCON_H1.variant(mamba_rms_norm=True, mamba_proj_bias=True),
    "falcon_h1, bias of attention alone, odd heads": FALCON_H1.variant(attention_bias=True, **ODD_HEADS),
    "falcon_h1, biases of both mixers, odd heads": FALCON_H1.variant(
        mamba_proj_bias=True, attention_bias=True, **ODD_HEADS
    ),
    "falcon_h1, norm before gate, biases, width 2": FALCON_H1.variant(
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        projectors_bias=True,
        mamba_proj_bias=True,
        attention_bias=True,
        mamba_d_conv=2,
        mamba_n_groups=4,
    ),
    "granite, rope, groups, dt limits": GRANITE.variant(
        published={"layer_types": None, "layers_block_type": ["mamba", "attention", "mamba"]},
        position_embedding_type="rope",
        mamba_n_groups=GRANITE_GROUPS,
        time_step_limit=[0.03, 0.5],
        mamba_d_conv=3,
    ),
    "granite, no experts, tied, biases": GRANITE.variant(
        published={"layer_types": ["mamba", "attention", "mamba"]},
        num_local_experts=0,
        tie_word_embeddings=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mamba_d_conv=2,
    ),
    "granite, attention only": GRANITE.variant(
        published={"layer_types": ["attention"] * 3},
        layer_types=["full_attention"] * 3,
        num_local_experts=0,
        position_embedding_type="rope",
    ),
}
