"""The configuration of a GGUF file, in the words of config.json: what families read.

Values are passed on as they are; families check them against their bounds. Only their types are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.base.errors import ModelError
from weft.base.gguf.header import Header, StoredTensor, shown
from weft.models.gguf.frequencies import STRETCHED, numbers_of, stretched

Fields = dict[str, Any]
# Of a list of layers, so that a number cannot make it long.
MOST_LAYERS = 1024
SIGMOID = 2
# Fields for which "none" differs from their default, so that it must be said.
NULLABLE = ("sliding_window",)
# Fields of config.json by the last part of a key.
PLAIN = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


class FileKeys:
    """Metadata of the file's architecture."""

    def __init__(self, header: Header) -> None:
        self.header = header
        arch = header.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{header.path}: general.architecture must be a name, got {arch!r:.80}")
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.arch}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise self.wrong(key, "a number that is an integer", value)
        return value

    def wrong(self, key: str, what: str, value: object) -> ModelError:
        return ModelError(f"{self.header.path}: {self.arch}.{key} must be {what}, got {value!r:.80}")

    @property
    def heads_to_come(self) -> int:
        """The number of trailing blocks that predict further tokens."""
        return self.integer("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        """The number of blocks of the model itself."""
        count = self.integer("block_count") - self.heads_to_come
        if not 0 < count <= MOST_LAYERS:
            raise self.wrong("block_count", f"1 to {MOST_LAYERS} blocks", count)
        return count

    def each(self, key: str) -> list[int]:
        """Return a value for every layer, which a file may state once for all."""
        value = self.get(key)
        found = value if isinstance(value, list) else [value] * self.layers
        if len(found) < self.layers or not all(type(each) in (int, bool) for each in found):
            raise self.wrong(key, f"{self.layers} numbers", value)
        return [int(each) for each in found[: self.layers]]

    def largest(self, key: str) -> int:
        return max(self.each(key))

    def tensor(self, name: str) -> StoredTensor:
        found = self.header.tensors.get(name)
        if found is None:
            raise ModelError(f"{self.header.path} has no tensor {name}")
        return found

    def has(self, name: str) -> bool:
        return name in self.header.tensors


def config_of(header: Header) -> Fields:
    """Return what config.json would say."""
    keys = FileKeys(header)
    builder = FAMILIES.get(keys.arch)
    if builder is None:
        raise ModelError(
            f"{header.path}: architecture {shown(keys.arch)} of a GGUF file is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    fields = {name: keys.get(key) for key, name in PLAIN.items()}
    embedding = keys.tensor("token_embd.weight")
    fields |= {
        "model_type": keys.arch,
        "dtype": dtype_of(header),
        "vocab_size": embedding.shape[0] if len(embedding.shape) == 2 else None,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.largest("attention.head_count"),
        "num_key_value_heads": keys.largest("attention.head_count_kv") if keys.get("attention.head_count_kv") else None,
        "tie_word_embeddings": not keys.has("output.weight"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if keys.get("feed_forward_length") is not None:
        fields["intermediate_size"] = keys.largest("feed_forward_length")
    fields |= rotation(keys) | builder(keys)
    return {name: value for name, value in fields.items() if value is not None or name in NULLABLE}


def dtype_of(header: Header) -> str:
    """Return the dtype of activations: float32 only if all matrices are."""
    kinds = {each.type for each in header.tensors.values() if len(each.shape) > 1 and each.name.startswith("blk.")}
    return "float32" if kinds <= {"F32"} else "bfloat16"


def rotation(keys: FileKeys) -> Fields:
    """Return how positions are stretched."""
    kind = keys.get("rope.scaling.type")
    if kind in ("linear", "yarn"):
        found = {"rope_type": kind, "factor": keys.get("rope.scaling.factor")}
        if kind == "yarn":
            found["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length")
            found["beta_fast"] = keys.get("rope.scaling.yarn_beta_fast")
            found["beta_slow"] = keys.get("rope.scaling.yarn_beta_slow")
        return {"rope_scaling": {name: value for name, value in found.items() if value is not None}}
    if kind not in (None, "none"):
        raise keys.wrong("rope.scaling.type", "none, linear or yarn", kind)
    if keys.has("rope_freqs.weight"):
        theta = keys.get("rope.freq_base", 10000.0)
        if not isinstance(theta, float) or not theta > 1:
            raise keys.wrong("rope.freq_base", "a number above 1", theta)
        factor = stretched(keys.tensor("rope_freqs.weight"), theta)
        return {"rope_scaling": {"rope_type": "llama3", **STRETCHED, "factor": factor}}
    return {}


def llama(keys: FileKeys) -> Fields:
    if keys.get("expert_count"):
        raise keys.wrong(
            "expert_count", "absent: this architecture is not supported with experts", keys.get("expert_count")
        )
    fields: Fields = {"architectures": ["LlamaForCausalLM"], "attention_bias": keys.has("blk.0.attn_q.bias")}
    return fields | {"mlp_bias": keys.has("blk.0.ffn_gate.bias")}


def mistral(keys: FileKeys) -> Fields:
    window = keys.get("attention.sliding_window")
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window or None}


def qwen2(keys: FileKeys) -> Fields:
    return {"architectures": ["Qwen2ForCausalLM"]}


def phi3(keys: FileKeys) -> Fields:
    size = keys.integer("embedding_length") // max(1, keys.largest("attention.head_count"))
    fields: Fields = {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": keys.get("attention.sliding_window") or None,
        "partial_rotary_factor": keys.integer("rope.dimension_count", size) / max(1, size),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
    }
    if keys.has("rope_factors_long.weight"):
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": numbers_of(keys.tensor("rope_factors_long.weight")),
            "short_factor": numbers_of(keys.tensor("rope_factors_short.weight")),
            "attention_factor": keys.get("rope.scaling.attn_factor"),
        }
    return fields


def smollm3(keys: FileKeys) -> Fields:
    return {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4}


def olmo2(keys: FileKeys) -> Fields:
    """Return the configuration of OLMo 2, or of OLMo 3 if there is a window."""
    window = keys.get("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"]}
    windowed = keys.each("attention.sliding_window_pattern")
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "rope_local_base_freq": keys.get("rope.freq_base"),
    }


def gemma2(keys: FileKeys) -> Fields:
    # The largest model has another scale, which files leave to the program.
    size, heads = keys.integer("attention.key_length", 256), max(1, keys.largest("attention.head_count"))
    is_largest = keys.layers == 46
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": keys.integer("embedding_length") // heads if is_largest else size,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def qwen3(keys: FileKeys) -> Fields:
    return {"architectures": ["Qwen3ForCausalLM"]}


def qwen3_moe(keys: FileKeys) -> Fields:
    return {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": keys.get("expert_count"), "norm_topk_prob": True}


def lfm2(keys: FileKeys) -> Fields:
    kinds = ["full_attention" if heads else "conv" for heads in keys.each("attention.head_count_kv")]
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": kinds,
        "conv_L_cache": keys.get("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
    }


def lfm2_moe(keys: FileKeys) -> Fields:
    if keys.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise keys.wrong("expert_gating_func", f"{SIGMOID} (sigmoid)", keys.get("expert_gating_func"))
    return lfm2(keys) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": keys.get("expert_count"),
        "num_dense_layers": keys.get("leading_dense_block_count"),
        "norm_topk_prob": keys.get("expert_weights_norm", True),
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in keys.header.tensors),
    }


def delta(keys: FileKeys) -> Fields:
    """Return what all families with Gated DeltaNet state."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    listed = keys.get("attention.recurrent_layers")
    interval = keys.integer("full_attention_interval", 4)
    if listed is not None:
        kinds = ["linear_attention" if each else "full_attention" for each in keys.each("attention.recurrent_layers")]
    else:
        kinds = ["linear_attention" if (n + 1) % max(1, interval) else "full_attention" for n in range(keys.layers)]
    size = keys.get("attention.key_length") or keys.integer("embedding_length") // max(
        1, keys.largest("attention.head_count")
    )
    fields = {
        "layer_types": kinds,
        "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
        "linear_key_head_dim": keys.get("ssm.state_size"),
        "linear_num_key_heads": keys.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // max(1, heads),
        "partial_rotary_factor": keys.integer("rope.dimension_count", size) / size,
        "mtp_num_hidden_layers": keys.heads_to_come or None,
    }
    if keys.get("expert_count"):
        fields["num_experts"] = keys.get("expert_count")
        fields["shared_expert_intermediate_size"] = keys.get("expert_shared_feed_forward_length")
        fields["norm_topk_prob"] = True
    return fields


def qwen3_next(keys: FileKeys) -> Fields:
    return delta(keys) | {"architectures": ["Qwen3NextForCausalLM"]}


def qwen3_5(keys: FileKeys) -> Fields:
    return delta(keys) | {"architectures": ["Qwen3_5ForCausalLM"]}


def gemma3(keys: FileKeys) -> Fields:
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        windowed = [bool(each) for each in keys.each("attention.sliding_window_pattern")]
    else:
        windowed = [
            bool((n + 1) % max(1, keys.integer("attention.sliding_window_pattern", 6))) for n in range(keys.layers)
        ]
    window = keys.get("attention.sliding_window") or None
    if window is None:
        # Then all layers are of one kind.
        windowed = [False] * keys.layers
    # The largest model has another scale, which files leave to the program.
    size, heads = keys.integer("attention.key_length", 256), max(1, keys.largest("attention.head_count"))
    is_largest = keys.layers == 62
    fields: Fields = {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": window,
        "query_pre_attn_scalar": keys.integer("embedding_length") // heads if is_largest else size,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.get("rope.freq_base", 1e6),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }
    return fields


def gpt_oss(keys: FileKeys) -> Fields:
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": keys.get("expert_count"),
        "intermediate_size": keys.get("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "hidden_act": "silu",
        "rope_scaling": rotation(keys).get("rope_scaling", {}) | {"truncate": False},
    }


def mamba2(keys: FileKeys) -> Fields:
    """Return the sizes of Mamba2 layers by the names of Falcon-H1 and Granite."""
    return {
        "mamba_n_heads": keys.get("ssm.time_step_rank"),
        "mamba_n_groups": keys.get("ssm.group_count"),
        "mamba_d_state": keys.get("ssm.state_size"),
        "mamba_d_conv": keys.get("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.header.tensors),
    }


def granite_hybrid(keys: FileKeys) -> Fields:
    rotates = keys.get("rope.scaling.finetuned", True)
    hidden, inner = keys.integer("embedding_length"), keys.integer("ssm.inner_size")
    kinds = ["attention" if heads else "mamba" for heads in keys.each("attention.head_count_kv")]
    experts = keys.get("expert_count") or 0
    feed_forward = keys.largest("feed_forward_length")
    return mamba2(keys) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": kinds,
        "mamba_expand": inner // max(1, hidden),
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": keys.get("attention.scale"),
        "embedding_multiplier": keys.get("embedding_scale"),
        "residual_multiplier": keys.get("residual_scale"),
        "logits_scaling": keys.get("logit_scale"),
        "num_local_experts": experts,
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length") or feed_forward,
    }


def falcon_h1(keys: FileKeys) -> Fields:
    """Return the configuration. All factors are folded into the weights of a file."""
    return mamba2(keys) | {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": keys.get("ssm.inner_size"),
        "mamba_rms_norm": keys.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def nemotron_kind(keys: FileKeys, number: int, heads: int, size: int) -> str:
    """Return the kind of a block, each of which is one layer."""
    if heads:
        return "attention"
    if keys.has(f"blk.{number}.ffn_gate_inp.weight"):
        return "moe"
    return "mlp" if size else "mamba"


def nemotron_h(keys: FileKeys) -> Fields:
    heads, sizes = keys.each("attention.head_count_kv"), keys.each("feed_forward_length")
    experts = keys.get("expert_count") or 0
    kinds = [nemotron_kind(keys, number, *sizes) for number, sizes in enumerate(zip(heads, sizes))]
    inner, count = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    fields: Fields = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "layer_norm_epsilon": keys.get("attention.layer_norm_rms_epsilon") or keys.get("attention.layer_norm_epsilon"),
        "mamba_num_heads": count,
        "mamba_head_dim": inner // max(1, count),
        "n_groups": keys.get("ssm.group_count"),
        "ssm_state_size": keys.get("ssm.state_size"),
        "conv_kernel": keys.get("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.header.tensors),
        "num_nextn_predict_layers": keys.heads_to_come or None,
    }
    if experts:
        fields |= {
            "n_routed_experts": experts,
            "moe_shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length"),
            "moe_latent_size": keys.get("moe_latent_size"),
            "n_group": keys.get("expert_group_count"),
            "topk_group": keys.get("expert_group_used_count"),
            "norm_topk_prob": keys.get("expert_weights_norm"),
            "routed_scaling_factor": keys.get("expert_weights_scale"),
        }
    return fields


def kimi_linear(keys: FileKeys) -> Fields:
    latent, turned = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    kinds = ["full_attention" if heads else "linear_attention" for heads in keys.each("attention.head_count_kv")]
    heads = keys.largest("attention.head_count")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": kinds,
        "num_key_value_heads": heads,
        "head_dim": None,
        "linear_attn_config": {
            "head_dim": keys.get("kda.head_dim"),
            "num_heads": heads,
            "short_conv_kernel_size": keys.get("ssm.conv_kernel"),
        },
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys.integer("attention.key_length_mla") - turned,
        "v_head_dim": keys.get("attention.value_length_mla"),
        "num_experts": keys.get("expert_count"),
        "num_shared_experts": keys.get("expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count"),
        "routed_scaling_factor": keys.get("expert_weights_scale"),
        "moe_renormalize": keys.get("expert_weights_norm", True),
    }


FAMILIES: Mapping[str, Callable[[FileKeys], Fields]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "phi3": phi3,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "gemma2": gemma2,
    "qwen3": qwen3,
    "qwen3moe": qwen3_moe,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "qwen3next": qwen3_next,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
    "granitehybrid": granite_hybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "kimi-linear": kimi_linear,
}
