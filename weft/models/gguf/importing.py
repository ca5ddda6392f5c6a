"""A GGUF file as a folder of safetensors with the names of the public implementation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from weft.base.errors import ModelError
from weft.base.gguf.header import read_header
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.models.gguf.configuration import config_of
from weft.models.gguf.tensors import NUMBERS, ORDER, FileTensor, tensors

# Bytes of a file, of which one is in memory at a time.
MOST_BYTES = 4 << 30
MODEL_TYPES = {
    "llama": "llama", "mistral": "mistral", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "granitehybrid": "granitemoehybrid", "falcon-h1": "falcon_h1",
    "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h",
}  # fmt: skip
MAMBA = (r"\.self_attn\.(in_proj\.|conv1d\.|out_proj\.|norm\.|A_log$|D$|dt_bias$)", r".mamba.\1")
DELTA = ((r"\.self_attn\.(in_proj_\w+\.|conv1d\.|out_proj\.|norm\.|A_log$|dt_bias$)", r".linear_attn.\1"),)
LFM2 = (
    (r"^model\.norm\.", "model.embedding_norm."), (r"\.input_layernorm\.", ".operator_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."), (r"\.self_attn\.(in_proj|out_proj|conv)\.", r".conv.\1."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."), (r"\.(q|k)_norm\.", r".\1_layernorm."),
    (r"\.mlp\.", ".feed_forward."), (r"\.gate_proj\.", ".w1."), (r"\.up_proj\.", ".w3."), (r"\.down_proj\.", ".w2."),
)  # fmt: skip
NEMOTRON = (
    (r"^model\.embed_tokens\.", "backbone.embeddings."), (r"^model\.norm\.", "backbone.norm_f."),
    (r"^model\.", "backbone."),
)  # fmt: skip
# The model's own names to those of checkpoints.
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "lfm2": LFM2, "lfm2moe": LFM2, "qwen3next": DELTA, "qwen35": DELTA, "qwen35moe": DELTA,
    "gpt-oss": ((r"\.mlp\.gate\.", ".mlp.router."),),
    "granitehybrid": (
        MAMBA, (r"\.mlp\.router\.", ".block_sparse_moe.router.layer."),
        (r"\.mlp\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
        (r"\.mlp\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
        (r"\.mlp\.down_proj\.", ".shared_mlp.output_linear."), (r"\.mlp\.input_linear\.", ".shared_mlp.input_linear."),
    ),
    "falcon-h1": ((r"^model\.norm\.", "model.final_layernorm."),),
    "nemotron_h": NEMOTRON, "nemotron_h_moe": NEMOTRON,
}  # fmt: skip
# Families whose checkpoints have one tensor for each expert.
SINGLE = ("qwen3moe", "lfm2moe", "qwen3next", "nemotron_h_moe")


def import_file(file: Path, folder: Path, written: Callable[[int], object]) -> None:
    """Write configuration and weights of a file. Matrices become 16 bits wide, or 32 where the file has only those."""
    header = read_header(file)
    config = config_of(header)
    arch = config["model_type"]
    if arch not in MODEL_TYPES:
        raise ModelError(f"{file}: files of {arch} cannot be converted back; supported are {', '.join(MODEL_TYPES)}")
    dtype = torch.float32 if config["dtype"] == "float32" else torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published(config, arch), indent=2))
    save_in_parts(folder, converted(file, arch, dtype, written))


def published(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Return a configuration as the public implementation writes it."""
    found = {**config, "model_type": MODEL_TYPES[arch]}
    if arch.startswith("qwen3") and "partial_rotary_factor" in config:
        stretched = config.get("rope_scaling") or {"rope_type": "default"}
        names = ("rope_theta", "partial_rotary_factor")
        found["rope_parameters"] = {**stretched, **{name: config[name] for name in names if name in config}}
    if arch == "falcon-h1":
        found["mamba_d_head"] = config["mamba_d_ssm"] // max(1, config["mamba_n_heads"])
    return found


def converted(
    file: Path, arch: str, dtype: torch.dtype, written: Callable[[int], object]
) -> Iterator[tuple[str, Tensor]]:
    """Return all tensors by their names in checkpoints."""
    found = {each.name: each for each in tensors(file)}
    for name, each in found.items():
        if name.endswith(ORDER):
            continue
        tensor = numbers(each, found.get(name + ORDER))
        tensor = tensor.to(dtype if tensor.ndim > 1 else torch.float32).contiguous()
        for own, part in parted(arch, name, tensor):
            yield renamed(arch, own), part
        written(each.bytes)


def numbers(each: FileTensor, order: FileTensor | None) -> Tensor:
    """Return a tensor's numbers, with the inputs in the model's own order."""
    tensor = each.read()
    if each.type in NUMBERS:
        return tensor
    decoded = BLOCK_TYPES[each.type].of(tensor).decode()
    return decoded if order is None else decoded.index_select(-1, order.read().argsort())


def parted(arch: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return single experts where checkpoints have them."""
    place, _, last = name.rpartition(".")
    if arch in SINGLE and place.endswith("experts") and last in ("gate_up_proj", "up_proj", "down_proj"):
        for number, matrix in enumerate(tensor):
            pieces = zip(("gate_proj", "up_proj"), matrix.chunk(2)) if last == "gate_up_proj" else [(last, matrix)]
            for which, piece in pieces:
                yield f"{place}.{number}.{which}.weight", piece.contiguous()
    else:
        yield name, tensor


def renamed(arch: str, name: str) -> str:
    if name.startswith("mtp."):
        return name
    for pattern, replacement in NAMES.get(arch, ()):
        name = re.sub(pattern, replacement, name)
    return name


def save_in_parts(folder: Path, found: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors to files of a few gigabytes, and which file has which of them."""
    places: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total, count = 0, 0

    def save() -> None:
        nonlocal held, count
        count += 1
        name = f"model-{count:05}.safetensors"
        save_file(held, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held = {}

    for name, tensor in found:
        held[name] = tensor
        total += tensor.numel() * tensor.element_size()
        if sum(each.numel() * each.element_size() for each in held.values()) > MOST_BYTES:
            save()
    if held:
        save()
    if count == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
