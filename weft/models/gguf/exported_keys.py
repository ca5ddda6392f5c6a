"""The metadata of a GGUF file for a checkpoint: the inverse of `configuration.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import ModelError
from weft.models.gguf.frequencies import factors

Fields = Mapping[str, Any]
Keys = dict[str, Any]
# Architectures of files by those of checkpoints. Others fold factors into weights, or are not known to other programs.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotron_h",
}
# Fields that configurations may leave out.
DEFAULTS: dict[str, Fields] = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Gemma3ForCausalLM": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
    "GptOssForCausalLM": {"head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5},
}
ATTENTION = ("full_attention", "sliding_attention", "attention", "*")
# Layers of Gemma 3 from one without a window to the next, which files need not state.
USUAL_PERIOD = 6
LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def architecture_of(config: Fields) -> str:
    """Return the file's architecture for a configuration; raise if Weft writes none."""
    [name, *_] = config.get("architectures") or ["?"]
    arch = ARCHITECTURES.get(name)
    if arch is None:
        raise ModelError(f"{name} cannot be written as a GGUF file; supported are {', '.join(ARCHITECTURES)}")
    return f"{arch}_moe" if arch == "nemotron_h" and "moe" in kinds_of(config) else arch


def kinds_of(config: Fields) -> list[str]:
    """Return the kinds of all layers."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [LETTERS.get(letter, letter) for letter in pattern]
    listed = config.get("layer_types") or config.get("layers_block_type")
    count = config.get("num_hidden_layers") or 0
    if listed:
        return list(listed)
    interval = config.get("full_attention_interval")
    if interval:
        return ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(count)]
    return ["full_attention"] * count


def keys_of(config: Fields, arch: str, heads_to_come: int) -> Keys:
    """Return the metadata that describes the model. `heads_to_come`: blocks that predict further tokens."""
    config = {**DEFAULTS.get(config["architectures"][0], {}), **config}
    get, kinds = config.get, kinds_of(config)
    theta, scaling = rotation_of(config)
    groups = get("num_key_value_heads") or get("num_attention_heads")
    is_hybrid = arch.startswith(("lfm2", "granitehybrid", "nemotron_h"))
    size = get("head_dim") or get("hidden_size", 0) // max(1, get("num_attention_heads", 1))
    eps = get("rms_norm_eps") or get("norm_eps") or get("layer_norm_epsilon") or 1e-6
    found: Keys = {
        "block_count": len(kinds) + heads_to_come,
        "context_length": get("max_position_embeddings"),
        "embedding_length": get("hidden_size"),
        "feed_forward_length": get("intermediate_size"),
        "vocab_size": get("vocab_size"),
        "attention.head_count": get("num_attention_heads"),
        "attention.head_count_kv": [groups if kind in ATTENTION else 0 for kind in kinds] if is_hybrid else groups,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(eps),
        "rope.freq_base": theta,
        "rope.dimension_count": size,
        "expert_count": get("num_experts") or get("num_local_experts") or get("n_routed_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "nextn_predict_layers": heads_to_come or None,
        **scaling,
    }
    if not found["expert_count"]:
        found |= dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
    own = OWN.get(arch.removesuffix("_moe") if arch.startswith("nemotron") else arch)
    found |= own(config, kinds) if own is not None else {}
    return {f"{arch}.{key}": value for key, value in found.items() if value is not None}


def stated_rotation(config: Fields) -> tuple[Fields, str, float]:
    """Return the parameters of rotation, their kind, and the base."""
    stated: Fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stated = stated.get("full_attention", stated)
    kind = stated.get("rope_type") or stated.get("type") or "default"
    return stated, kind, float(stated.get("rope_theta") or config.get("rope_theta") or 10000.0)


def rotation_factors(config: Fields, pairs: int) -> NDArray[np.float32] | None:
    """Return a factor for each pair of dimensions if a file states the rotation so: that of Llama 3."""
    stated, kind, theta = stated_rotation(config)
    if kind != "llama3":
        return None
    return factors(float(stated["factor"]), theta, pairs).astype(np.float32)


def rotation_of(config: Fields) -> tuple[float, Keys]:
    """Return the base of rotation, and how it is stretched."""
    stated, kind, theta = stated_rotation(config)
    if kind in ("default", "llama3"):
        return theta, {}
    if kind not in ("linear", "yarn"):
        known = "linear, yarn and llama3"
        raise ModelError(f"rope_type {kind!r:.80} cannot be written as a GGUF file; supported are {known}")
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(stated["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = stated.get("original_max_position_embeddings")
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if stated.get(name) is not None:
                found[f"rope.scaling.{key}"] = float(stated[name])
    return theta, found


def mistral_window(config: Fields, kinds: list[str]) -> Keys:
    if config["architectures"][0].startswith("Mistral") and config.get("sliding_window"):
        raise ModelError("a sliding window cannot be written in a GGUF file of this family; set sliding_window to null")
    return {}


def lfm2(config: Fields, kinds: list[str]) -> Keys:
    return {"shortconv.l_cache": config.get("conv_L_cache", 3)}


def lfm2_moe(config: Fields, kinds: list[str]) -> Keys:
    return lfm2(config, kinds) | {
        "leading_dense_block_count": config.get("num_dense_layers"),
        "expert_gating_func": 2,
        "expert_weights_scale": float(config.get("routed_scaling_factor") or 1.0),
    }


def delta(config: Fields, kinds: list[str]) -> Keys:
    get = config.get
    stated = get("rope_parameters") or {}
    share = stated.get("partial_rotary_factor") or get("partial_rotary_factor") or 0.25
    size = get("head_dim") or get("hidden_size", 0) // max(1, get("num_attention_heads", 1))
    turned = int(size * share)
    interval = next((n + 1 for n, kind in enumerate(kinds) if kind in ATTENTION), 4)
    regular = ["full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(len(kinds))]
    if kinds != regular:
        raise ModelError("layer_types of a GGUF file must have full attention at regular intervals")
    return {
        "ssm.conv_kernel": get("linear_conv_kernel_dim", 4),
        "ssm.state_size": get("linear_key_head_dim"),
        "ssm.group_count": get("linear_num_key_heads"),
        "ssm.time_step_rank": get("linear_num_value_heads"),
        "ssm.inner_size": get("linear_num_value_heads", 0) * get("linear_value_head_dim", 0),
        "full_attention_interval": interval,
        "rope.dimension_count": turned,
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
    }


def delta_in_sections(config: Fields, kinds: list[str]) -> Keys:
    """Add how pairs are shared by the positions of images; in texts all positions are equal."""
    found = delta(config, kinds)
    pairs = found["rope.dimension_count"] // 2
    stated = (config.get("rope_parameters") or {}).get("mrope_section")
    third = pairs // 3
    return found | {"rope.dimension_sections": [*(stated or (pairs - 2 * third, third, third)), 0][:4]}


def gemma3(config: Fields, kinds: list[str]) -> Keys:
    interval = period(config, kinds)
    size = config["head_dim"]
    if config.get("query_pre_attn_scalar", size) != size and len(kinds) != 62:
        raise ModelError("query_pre_attn_scalar of a GGUF file must be head_dim")
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    bound = config.get("final_logit_softcapping")
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": None if interval == USUAL_PERIOD else interval,
        "rope.freq_base_swa": float(local or config.get("rope_local_base_freq") or 10000.0),
        "final_logit_softcapping": None if bound is None else float(bound),
    }


def period(config: Fields, kinds: list[str]) -> int:
    """Return after how many layers there is one without a window."""
    if not config.get("layer_types"):
        return int(config.get("sliding_window_pattern") or USUAL_PERIOD)
    windowed = [kind == "sliding_attention" for kind in kinds]
    found = windowed.index(False) + 1 if False in windowed else USUAL_PERIOD
    if windowed != [bool((n + 1) % found) for n in range(len(kinds))]:
        raise ModelError("layer_types of a GGUF file must have full attention at regular intervals")
    return found


def gpt_oss(config: Fields, kinds: list[str]) -> Keys:
    return {
        "attention.sliding_window": config.get("sliding_window"),
        "expert_feed_forward_length": config.get("intermediate_size"),
    }


def granite_hybrid(config: Fields, kinds: list[str]) -> Keys:
    get = config.get
    return {
        "ssm.conv_kernel": get("mamba_d_conv", 4),
        "ssm.state_size": get("mamba_d_state"),
        "ssm.group_count": get("mamba_n_groups", 1),
        "ssm.time_step_rank": get("mamba_n_heads"),
        "ssm.inner_size": get("mamba_expand", 2) * get("hidden_size", 0),
        "attention.scale": float(get("attention_multiplier", 1.0)),
        "embedding_scale": float(get("embedding_multiplier", 1.0)),
        "residual_scale": float(get("residual_multiplier", 1.0)),
        "logit_scale": float(get("logits_scaling", 1.0)),
        "expert_shared_feed_forward_length": get("shared_intermediate_size"),
        "feed_forward_length": get("intermediate_size" if get("num_local_experts") else "shared_intermediate_size"),
        "rope.scaling.finetuned": get("position_embedding_type") == "rope",
    }


def nemotron_h(config: Fields, kinds: list[str]) -> Keys:
    get = config.get
    sizes = {"mlp": get("intermediate_size"), "-": get("intermediate_size"), "moe": get("moe_intermediate_size")}
    return {
        # Some readers ask for it by this name.
        "attention.layer_norm_epsilon": float(get("layer_norm_epsilon") or 1e-5),
        "ssm.conv_kernel": get("conv_kernel", 4),
        "ssm.state_size": get("ssm_state_size"),
        "ssm.group_count": get("n_groups"),
        "ssm.time_step_rank": get("mamba_num_heads"),
        "ssm.inner_size": get("mamba_num_heads", 0) * get("mamba_head_dim", 0),
        "feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "expert_shared_count": get("n_shared_experts"),
        "expert_shared_feed_forward_length": get("moe_shared_expert_intermediate_size"),
        "moe_latent_size": get("moe_latent_size"),
        "expert_group_count": get("n_group"),
        "expert_group_used_count": get("topk_group"),
        "expert_weights_norm": get("norm_topk_prob"),
        "expert_weights_scale": float(get("routed_scaling_factor") or 1.0),
    }


OWN: dict[str, Callable[[Fields, list[str]], Keys]] = {
    "llama": mistral_window,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "qwen3next": delta,
    "qwen35": delta_in_sections,
    "qwen35moe": delta_in_sections,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
    "granitehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
}
