"""Range of every number that a config.json may hold, by field: far beyond anything published.

A checkpoint is untrusted. Its sizes are allocated and its layers built before its weights can contradict them, so a
field is refused here, by name, before it is used. Fields that are not in these tables cannot be read.
"""

from __future__ import annotations

# One entry of a message or a list: long enough to recognise.
MOST_SHOWN = 80
MOST_ENTRIES = 4096
# Configurations of mixed precision list every matrix of every expert.
CONFIG_BYTES = 16 << 20
INDEX_BYTES = 64 << 20

LAYERS = 1024
HEADS = 4096
HEAD_DIM = 4096
WIDTH = 1 << 17
INNER = 1 << 20
EXPERTS = 4096
POSITIONS = 1 << 30

# The minimum is 1 unless the family overrides it.
INTEGERS: dict[str, int] = {
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": LAYERS,
    "max_window_layers": LAYERS,
    "num_dense_layers": LAYERS,
    "full_attention_interval": LAYERS,
    "sliding_window_pattern": LAYERS,
    "no_rope_layer_interval": LAYERS,
    "decoder_sparse_step": LAYERS,
    "vocab_size": 1 << 22,
    "hidden_size": WIDTH,
    "moe_latent_size": WIDTH,
    "kv_lora_rank": WIDTH,
    "intermediate_size": INNER,
    "block_ff_dim": INNER,
    "block_multiple_of": INNER,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "moe_shared_expert_intermediate_size": INNER,
    "shared_intermediate_size": INNER,
    "mamba_d_ssm": INNER,
    "mamba_expand": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_num_heads": HEADS,
    "num_heads": HEADS,
    "mamba_n_heads": HEADS,
    "mamba_num_heads": HEADS,
    "mamba_n_groups": HEADS,
    "n_groups": HEADS,
    "head_dim": HEAD_DIM,
    "attention_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_head_dim": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "mamba_head_dim": HEAD_DIM,
    "mamba_d_state": HEAD_DIM,
    "ssm_state_size": HEAD_DIM,
    # A cell must be longer than a convolution's history.
    "mamba_d_conv": 32,
    "conv_kernel": 32,
    "linear_conv_kernel_dim": 32,
    "short_conv_kernel_size": 32,
    "conv_L_cache": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "experts_per_token": EXPERTS,
    "num_experts_per_token": EXPERTS,
    "num_shared_experts": EXPERTS,
    "n_shared_experts": EXPERTS,
    "n_group": EXPERTS,
    "num_expert_group": EXPERTS,
    "topk_group": EXPERTS,
    "max_position_embeddings": POSITIONS,
    "model_max_length": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": POSITIONS,
}

_EPS = (0.0, 1.0)
_FACTOR = (-1e6, 1e6)
_POSITIVE = (1e-6, 1e6)
NUMBERS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": _EPS,
    "norm_eps": _EPS,
    "layer_norm_epsilon": _EPS,
    "attention_multiplier": _FACTOR,
    "attention_in_multiplier": _FACTOR,
    "attention_out_multiplier": _FACTOR,
    "embedding_multiplier": _POSITIVE,
    "key_multiplier": _FACTOR,
    "lm_head_multiplier": _FACTOR,
    "mlp_multipliers": _FACTOR,
    "residual_multiplier": _FACTOR,
    "routed_scaling_factor": _FACTOR,
    "ssm_in_multiplier": _FACTOR,
    "ssm_multipliers": _FACTOR,
    "ssm_out_multiplier": _FACTOR,
    "block_ffn_dim_multiplier": (1e-3, 64.0),
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "swiglu_alpha": _FACTOR,
    "swiglu_limit": _POSITIVE,
    "rope_theta": (2.0, 1e12),
    "rope_local_base_freq": (2.0, 1e12),
    "partial_rotary_factor": (1e-3, 1.0),
    "factor": (1e-3, 1e6),
    "attention_factor": _POSITIVE,
    "long_factor": _POSITIVE,
    "short_factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
