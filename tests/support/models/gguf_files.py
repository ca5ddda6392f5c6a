"""GGUF files of tiny checkpoints, written by a page that knows what converters do and nothing of Weft's reader."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.torch import load_file
from torch import Tensor

# The type of a matrix by its name in the file.
Mixture = Callable[[str, tuple[int, ...]], str]
# Where a block of random bytes has its half-precision scales.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
RENAMES = (
    (r"^(model|backbone)\.(language_model\.)?", ""), (r"^(embed_tokens|embeddings)\.", "token_embd."),
    (r"^lm_head\.", "output."), (r"^(norm|norm_f|final_layernorm)\.", "output_norm."),
    (r"^embedding_norm\.", "token_embd_norm."), (r"^layers\.(\d+)\.", r"blk.\1."),
    (r"^(blk\.\d+)\.(input_layernorm|operator_norm|norm)\.weight$", r"\1.attn_norm.weight"),
    (r"\.(self_attn|mixer)\.(q|k|v)_proj\.", r".attn_\2."),
    (r"\.(self_attn\.o|self_attn\.out|mixer\.o)_proj\.", ".attn_output."),
    (r"\.self_attn\.qkv_proj\.", ".attn_qkv."), (r"\.mlp\.gate_up_proj\.", ".ffn_up."),
    (r"\.self_attn\.(q|k)_(norm|layernorm)\.", r".attn_\1_norm."), (r"\.self_attn\.sinks$", ".attn_sinks.weight"),
    (r"\.conv\.(conv|in_proj|out_proj)\.", r".shortconv.\1."),
    (r"\.feed_forward\.w1\.", ".ffn_gate."), (r"\.feed_forward\.w3\.", ".ffn_up."),
    (r"\.feed_forward\.w2\.", ".ffn_down."),
    (r"\.(mlp|feed_forward|mixer|block_sparse_moe)\.(gate|up|down)_proj\.", r".ffn_\2."),
    (r"\.(shared_experts?)\.(gate|up|down)_proj\.", r".ffn_\2_shexp."), (r"\.(mlp|mixer)\.ffn_", ".ffn_"),
    (r"\.mlp\.shared_expert_gate\.", ".ffn_gate_inp_shexp."),
    (r"\.(mlp|mixer|block_sparse_moe)\.gate\.e_score_correction_bias$", ".exp_probs_b.bias"),
    (r"\.feed_forward\.expert_bias$", ".exp_probs_b.bias"),
    (r"\.(mlp|feed_forward|mixer|block_sparse_moe)\.(gate|router|router\.layer)\.(weight|bias)$", r".ffn_gate_inp.\3"),
    (r"\.pre_ff_layernorm\.weight$", ".ffn_norm"), (r"\.block_sparse_moe\.ffn_", ".ffn_"),
    (r"\.self_attn\.(f_a|f_b|g_a|g_b)_proj\.", r".ssm_\1."), (r"\.self_attn\.b_proj\.", ".ssm_beta."),
    (r"\.self_attn\.o_norm\.", ".ssm_norm."), (r"\.self_attn\.A_log$", ".ssm_a"),
    (r"\.self_attn\.dt_bias$", ".ssm_dt.bias"), (r"\.self_attn\.(q|k|v)_conv1d\.", r".ssm_conv1d_\1."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attn_kv_a_mqa."), (r"\.self_attn\.kv_a_layernorm\.", ".attn_kv_a_norm."),
    (r"\.linear_attn\.in_proj_qkv\.", ".attn_qkv."), (r"\.linear_attn\.in_proj_z\.", ".attn_gate."),
    (r"\.linear_attn\.in_proj_a\.", ".ssm_alpha."), (r"\.linear_attn\.in_proj_b\.", ".ssm_beta."),
    (r"\.linear_attn\.in_proj_ba\.", ".ssm_ba."),
    (r"\.(mamba|mixer|linear_attn)\.A_log$", ".ssm_a"), (r"\.(mamba|mixer)\.D$", ".ssm_d"),
    (r"\.(mamba|mixer|linear_attn)\.dt_bias$", ".ssm_dt.bias"),
    (r"\.(mamba|mixer|linear_attn)\.conv1d\.", ".ssm_conv1d."),
    (r"\.(mamba|mixer|linear_attn)\.norm\.", ".ssm_norm."), (r"\.(mamba|mixer)\.in_proj\.", ".ssm_in."),
    (r"\.(mamba|mixer|linear_attn)\.out_proj\.", ".ssm_out."),
)  # fmt: skip


def entry(value: Any) -> bytes:
    """Return a metadata value with its type."""
    if isinstance(value, bytes):
        # Of a file that was read.
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    inner = [entry(each) for each in value]
    kind = inner[0][:4] if inner else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(each[4:] for each in inner)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write a file. A tensor is its type, its shape and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + entry(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", GGMLQuantizationType[kind].value, len(body))
        body += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def split(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], count: int) -> Path:
    """Write a file in several parts; return the first."""
    names = list(tensors)
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        more = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        write(part, {**(metadata if number == 0 else {}), **more}, own)
    return path.with_name(f"{path.stem}-00001-of-{count:05}.gguf")


def stored(matrix: Tensor, kind: str, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor in a type. Types that nothing here can write have random blocks of about the same size."""
    shape, numbers = tuple(matrix.shape), matrix.detach().float().contiguous().numpy()
    if kind == "F32":
        return kind, shape, numbers.astype("<f4").tobytes()
    number = GGMLQuantizationType[kind]
    if kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        return kind, shape, quants.quantize(numbers, number).tobytes()
    per_block, size = GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(seed).integers(0, 256, (numbers.size // per_block, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 120
    if kind == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 16 + 16
    for place in SCALES.get(kind, ()):
        blocks[:, place : place + 2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    spread = float(np.nanstd(quants.dequantize(blocks.reshape(-1, size), number)))
    factor = np.float16(0.001 * float(numbers.std()) / max(spread, 1e-9))
    for place in SCALES.get(kind, ()):
        blocks[:, place : place + 2] = np.frombuffer(factor.tobytes(), np.uint8)
    return kind, shape, blocks.tobytes()


def dequantised(tensor: tuple[str, tuple[int, ...], bytes]) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor as float32, as the public reader decodes it."""
    kind, shape, content = tensor
    if kind == "F32":
        return tensor
    number = GGMLQuantizationType[kind]
    rows = np.frombuffer(content, np.uint8).reshape(
        -1, shape[-1] // GGML_QUANT_SIZES[number][0] * GGML_QUANT_SIZES[number][1]
    )
    return "F32", shape, quants.dequantize(rows, number).astype("<f4").tobytes()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Put the halves of every head side by side, pair by pair."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tiled(weight: Tensor, keys: int, values: int, size: int, dim: int = 0, start: int = 0) -> Tensor:
    """Take the heads of values of every head of keys in turn."""
    before, own = weight.split([start, weight.shape[dim] - start], dim)
    moved = own.movedim(dim, 0).reshape(keys, values // keys, size, -1).transpose(0, 1)
    others = own.movedim(dim, 0).shape
    return torch.cat((before, moved.reshape(others).movedim(0, dim)), dim)


def converted(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and float32 tensors of a checkpoint, as converters write them."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    arch = ARCHITECTURES[config["architectures"][0]]
    if "moe" in config["model_type"] and arch == "qwen35":
        arch = "qwen35moe"
    found: dict[str, Tensor] = {}
    for name, tensor in stacked(tensors, config, arch).items():
        own = name
        for pattern, replacement in RENAMES:
            own = re.sub(pattern, replacement, own)
        found |= changed(own, tensor, config, arch)
    if arch in ("gemma2", "gemma3", "gpt-oss", "olmo2", "qwen3next") or arch.startswith("qwen35"):
        place = "pre_feedforward_layernorm" if arch in ("gemma2", "gemma3") else None
        found = {
            name.replace(".post_attention_layernorm.", ".post_attention_norm."): each for name, each in found.items()
        }
        found = {
            name.replace(f".{place}.", ".ffn_norm.").replace(".post_feedforward_layernorm.", ".post_ffw_norm."): each
            for name, each in found.items()
        }
    found = {name.replace(".post_attention_layernorm.", ".ffn_norm."): each for name, each in found.items()}
    return metadata_of(config, arch, found), found


ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Lfm2ForCausalLM": "lfm2",
    "Qwen3MoeForCausalLM": "qwen3moe", "Lfm2MoeForCausalLM": "lfm2moe", "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe", "Gemma3ForCausalLM": "gemma3",
    "Qwen2ForCausalLM": "qwen2", "Phi3ForCausalLM": "phi3", "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2", "Gemma2ForCausalLM": "gemma2",
    "GptOssForCausalLM": "gpt-oss", "GraniteMoeHybridForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotron_h_moe", "FalconH1ForCausalLM": "falcon-h1",
    "KimiLinearForCausalLM": "kimi-linear",
}  # fmt: skip
INTERLEAVED = ("llama", "smollm3", "granitehybrid", "nemotron_h_moe")
PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe", "gemma2", "gemma3")


def stacked(tensors: Mapping[str, Tensor], config: Mapping[str, Any], arch: str) -> dict[str, Tensor]:
    """Return a checkpoint whose experts are three tensors a layer, by the file's names."""
    found: dict[str, Tensor] = {}
    single: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        block = re.sub(r"^(model|backbone)\.(layers\.\d+)\..*", r"\2", name).replace("layers", "blk")
        one = re.search(r"experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$", name)
        names = {"w1": "gate", "w2": "down", "w3": "up"}
        if one:
            stem = names.get(one[2], one[2].removesuffix("_proj"))
            single.setdefault(f"{block}.ffn_{stem}_exps.weight", {})[int(one[1])] = tensor
        elif re.search(r"experts\.gate_up_proj(_bias)?$|block_sparse_moe\.input_linear\.weight$", name):
            ending = "bias" if name.endswith("_bias") else "weight"
            if arch == "gpt-oss":
                tensor = tensor if ending == "bias" else tensor.transpose(1, 2)
                pair = (tensor[:, ::2], tensor[:, 1::2])
            else:
                pair = tensor.chunk(2, 1)
            for stem, half in zip(("gate", "up"), pair):
                found[f"{block}.ffn_{stem}_exps.{ending}"] = half
        elif re.search(r"experts\.(down|up)_proj(_bias)?$|block_sparse_moe\.output_linear\.weight$", name):
            ending, stem = "bias" if name.endswith("_bias") else "weight", "up" if "up_proj" in name else "down"
            found[f"{block}.ffn_{stem}_exps.{ending}"] = (
                tensor.transpose(1, 2) if arch == "gpt-oss" and ending == "weight" else tensor
            )
        elif "shared_mlp.input_linear" in name:
            shared = "_shexp" if config.get("num_local_experts") else ""
            for stem, half in zip(("gate", "up"), tensor.chunk(2)):
                found[f"{block}.ffn_{stem}{shared}.weight"] = half
        elif "shared_mlp.output_linear" in name:
            found[f"{block}.ffn_down{'_shexp' if config.get('num_local_experts') else ''}.weight"] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([each[n] for n in sorted(each)]) for name, each in single.items()}


def changed(name: str, tensor: Tensor, config: Mapping[str, Any], arch: str) -> dict[str, Tensor]:
    """Return what a converter makes of a tensor."""
    last = re.sub(r"^blk\.\d+\.", "", name)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}
    if arch in INTERLEAVED and last.split(".")[0] in heads:
        tensor = interleaved(tensor, heads[last.split(".")[0]])
    if last == "ssm_a":
        tensor = -tensor.exp()
    if last in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        tensor = tensor[:, 0]
    if arch in PLUS_ONE and name.endswith(("norm.weight", "layernorm.weight")) and last != "ssm_norm.weight":
        tensor = tensor + 1
    if arch == "kimi-linear":
        return changed_kimi(name, last, tensor, config)
    if arch == "falcon-h1":
        tensor = tensor * factor_of(last, config)
    if arch in ("granitehybrid", "nemotron_h_moe", "falcon-h1"):
        if last in ("ssm_a", "ssm_d"):
            tensor = tensor[:, None]
        if last == "ssm_norm.weight":
            tensor = tensor.view(config.get("mamba_n_groups") or config.get("n_groups"), -1)
    if arch.startswith(("qwen35", "qwen3next")):
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dims = config["linear_key_head_dim"], config["linear_value_head_dim"]
        if last == "linear_attn.in_proj_qkvz.weight":
            own = values // keys * dims[1]
            parts = tensor.view(keys, -1, tensor.shape[-1]).split([dims[0], dims[0], own, own], 1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            block = name.removesuffix(last)
            return {f"{block}attn_qkv.weight": torch.cat((q, k, v)), f"{block}attn_gate.weight": z}
        if arch.startswith("qwen35") and keys != values:
            if last in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
                tensor = tiled(tensor, keys, values, 1)
            elif last == "attn_gate.weight":
                tensor = tiled(tensor, keys, values, dims[1])
            elif last in ("attn_qkv.weight", "ssm_conv1d.weight"):
                tensor = tiled(tensor, keys, values, dims[1], start=2 * keys * dims[0])
            elif last == "ssm_out.weight":
                tensor = tiled(tensor, keys, values, dims[1], dim=1)
    return {name: tensor}


def factor_of(last: str, config: Mapping[str, Any]) -> float | Tensor:
    """Return the factor that is multiplied into a weight of Falcon-H1."""
    get, before = config.get, config["attention_in_multiplier"]
    sizes = (get("mamba_d_ssm"), get("mamba_d_ssm"), *(get("mamba_n_groups") * get("mamba_d_state"),) * 2)
    each = zip(get("ssm_multipliers"), (*sizes, get("mamba_n_heads")))
    of_rows = torch.cat([torch.full((size, 1), factor) for factor, size in each])
    return {
        "token_embd.weight": get("embedding_multiplier"), "output.weight": get("lm_head_multiplier"),
        "attn_q.weight": before, "attn_v.weight": before, "attn_k.weight": before * get("key_multiplier"),
        "attn_output.weight": get("attention_out_multiplier"), "ssm_in.weight": get("ssm_in_multiplier") * of_rows,
        "ssm_out.weight": get("ssm_out_multiplier"), "ffn_gate.weight": get("mlp_multipliers")[0],
        "ffn_down.weight": get("mlp_multipliers")[1],
    }.get(last, 1.0)  # fmt: skip


def changed_kimi(name: str, last: str, tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    if last.startswith("ssm_conv1d"):
        return {name: tensor.view(1, tensor.shape[0], 1, -1)}
    if last.endswith("kv_b_proj.weight"):
        nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, rest = tensor.view(config["num_attention_heads"], nope + values, -1).split([nope, values], 1)
        block = name.removesuffix(last)
        return {f"{block}attn_k_b.weight": keys.transpose(1, 2), f"{block}attn_v_b.weight": rest}
    return {name: tensor}


def metadata_of(config: Mapping[str, Any], arch: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the metadata of a converted checkpoint."""
    get = config.get
    layers = get("num_hidden_layers") or len(config["layers_block_type"])
    kinds = get("layer_types") or get("layers_block_type") or ["full_attention"] * layers
    attends = [kind in ("full_attention", "sliding_attention", "attention") for kind in kinds]
    is_hybrid = arch in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h_moe", "kimi-linear")
    groups = 1 if arch == "kimi-linear" else config["num_key_value_heads"]
    rotation = get("rope_parameters") or {}
    rotation = rotation.get("full_attention", rotation)
    values: dict[str, Any] = {
        "block_count": layers,
        "context_length": get("max_position_embeddings"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [groups if each else 0 for each in attends] if is_hybrid else groups,
        "attention.key_length": get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps") or get("norm_eps") or get("layer_norm_epsilon"),
        "rope.freq_base": rotation.get("rope_theta") or get("rope_theta"),
        "attention.sliding_window": get("sliding_window"),
        "expert_count": get("num_experts") or get("num_local_experts") or get("n_routed_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
    }
    for own, names in OWN_KEYS.items():
        if arch.startswith(own):
            values |= {key: config.get(name) for key, name in names.items()}
    values |= computed_keys(config, arch, kinds, rotation)
    found = {"general.architecture": arch, "general.alignment": 32}
    return found | {f"{arch}.{key}": value for key, value in values.items() if value is not None}


# Keys of a family, and the fields of config.json that they are.
DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
OWN_KEYS = {
    "lfm2": {"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
    "qwen35": DELTA_KEYS,
    "qwen3next": DELTA_KEYS,
    "granitehybrid": {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    "nemotron_h": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt-oss": {"expert_feed_forward_length": "intermediate_size"},
    "falcon-h1": {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
        "ssm.inner_size": "mamba_d_ssm",
    },
    "kimi-linear": {
        "context_length": "model_max_length",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_used_count": "num_experts_per_token",
        "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
    },
}


def computed_keys(
    config: Mapping[str, Any], arch: str, kinds: Sequence[str], rotation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a family that are not fields of config.json."""
    hidden = config["hidden_size"]
    if arch == "kimi-linear":
        return {
            "attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        }
    if arch == "gpt-oss":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rotation["factor"]),
            "rope.scaling.original_context_length": rotation["original_max_position_embeddings"],
        }
    if arch == "phi3":
        size = config["hidden_size"] // config["num_attention_heads"]
        return {"rope.dimension_count": int(size * rotation.get("partial_rotary_factor", 1.0))}
    if arch == "olmo2" and "sliding_attention" in kinds:
        return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}
    if arch == "gemma3":
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta", 10000.0)
        pattern = [kind == "sliding_attention" for kind in kinds]
        return {"rope.freq_base_swa": local, "attention.sliding_window_pattern": pattern}
    if arch.startswith(("qwen35", "qwen3next")):
        size = config.get("head_dim") or hidden // config["num_attention_heads"]
        return {
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
            "rope.dimension_count": int(size * rotation.get("partial_rotary_factor", 0.25)),
        }
    if arch == "granitehybrid":
        rotates = config.get("position_embedding_type") == "rope"
        return {"ssm.inner_size": config.get("mamba_expand", 2) * hidden, "rope.scaling.finetuned": rotates}
    if arch == "nemotron_h_moe":
        sizes = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        return {"feed_forward_length": [sizes.get(kind, 0) for kind in kinds], "ssm.inner_size": inner}
    return {}


def convert(
    folder: Path, target: Path, mixture: Mixture | None = None, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint as a GGUF file, in float32 or with matrices in the types that `mixture` says."""
    values, tensors = converted(folder)
    written = {name: stored(each, type_of(name, each, mixture), len(name)) for name, each in tensors.items()}
    return write(target, {**values, **(metadata or {})}, written)


def type_of(name: str, tensor: Tensor, mixture: Mixture | None) -> str:
    """Return a tensor's type: what converters never quantise is float32."""
    kept = tensor.ndim < 2 or not name.endswith(".weight") or re.search(r"norm|gate_inp|conv1d|shortconv\.conv", name)
    return "F32" if mixture is None or kept else mixture(name, tuple(tensor.shape))


Written = tuple[str, tuple[int, ...], bytes]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Written]]:
    """Return metadata and tensors, as the public reader finds them."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    # Values with their types, which other readers are strict about.
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    metadata = {key: b"".join(part.tobytes() for part in field.parts[2:]) for key, field in fields.items()}
    shapes = {each.name: tuple(int(n) for n in reversed(each.shape)) for each in reader.tensors}
    return metadata, {
        each.name: (each.tensor_type.name, shapes[each.name], each.data.tobytes()) for each in reader.tensors
    }


def widened(path: Path, target: Path) -> Path:
    """Write the same numbers in float32, as the public reader decodes them."""
    metadata, tensors = read(path)
    return write(target, metadata, {name: dequantised(each) for name, each in tensors.items()})


def remade(path: Path, target: Path, mixture: Mixture) -> Path:
    """Write a file of float32 numbers with its matrices in other types."""
    metadata, tensors = read(path)
    numbers = {name: torch.frombuffer(bytearray(raw), dtype=torch.float32).view(shape) for name, (kind, shape, raw) in
               tensors.items()}  # fmt: skip
    written = {name: stored(each, type_of(name, each, mixture), len(name)) for name, each in numbers.items()}
    return write(target, metadata, written)


def names_of(types: Sequence[str]) -> Mixture:
    """Return a mixture that gives matrices these types in turn, in the order of their names."""

    def mixture(name: str, shape: tuple[int, ...]) -> str:
        kind = types[sum(map(ord, name)) % len(types)]
        return kind if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0 else "F16"

    return mixture
