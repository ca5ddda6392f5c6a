"""Tiny checkpoints in the formats of public tools, written by a page of PyTorch that knows nothing of Weft's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# What published recipes leave in 16 bits.
WIDE = re.compile(
    r"embed|lm_head|norm|conv1d|conv\.conv|\.gate\.weight|router|shared_expert_gate|in_proj_(a|b|ba)\.|A_log|dt_bias|bias$"
    r"|\.f_[ab]_proj|\.g_[ab]_proj|\.b_proj"
)


@dataclass(frozen=True)
class Written:
    """How a tool writes a matrix: `write` returns the tensors by what they append to its name, and its numbers."""

    config: dict[str, Any]
    write: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    extra: dict[str, Tensor] = field(default_factory=dict)


Write = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def by_block(rows: int, columns: int, suffix: str = "_scale_inv", dtype=torch.float32, four: bool = False) -> Write:
    def write(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = matrix.shape
        scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
        codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
        decoded = torch.empty(matrix.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = (matrix[place].abs().max() / 448).to(dtype).float()
                codes[place] = (matrix[place] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                decoded[place] = codes[place].float() * scales[i, j]
        stored = scales.to(dtype)
        return {"": codes, suffix: stored[:, None, :, None] if four else stored}, decoded

    return write


def by_channel(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, decoded = by_block(1, matrix.shape[1], "_scale")(matrix)
    return tensors, decoded


def by_tensor(shape: tuple[int, ...], suffix: str = "_scale"):
    def write(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, decoded = by_block(*matrix.shape, suffix)(matrix)
        return {"": tensors[""], suffix: tensors[suffix].reshape(shape)}, decoded

    return write


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own}},
        "ignore": ["lm_head", "re:.*in_proj_(a|b|ba)$", "re:.*\\.gate$", "re:.*shared_expert_gate", "re:.*_[ab]_proj$",
                   "re:.*\\.b_proj$", "re:.*router.*"],
    }  # fmt: skip


LISTED = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate", "b_proj", "gate"]
LISTED += ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
FP8 = {
    "blocks": Written(
        {"quant_method": "fp8", "weight_block_size": [24, 40], "modules_to_not_convert": LISTED}, by_block(24, 40)
    ),
    "blocks with short scales": Written(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": LISTED},
        by_block(128, 128, dtype=torch.bfloat16),
    ),
    "one scale": Written(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static", "ignored_layers": LISTED},
        by_tensor((), "_scale_inv"),
        {".activation_scale": torch.ones(())},
    ),
    "compressed-tensors, channels": Written(compressed("channel"), by_channel),
    "compressed-tensors, one scale": Written(compressed("tensor"), by_tensor((1,)), {".input_scale": torch.ones(1)}),
    "compressed-tensors, blocks": Written(
        compressed("block", block_structure=[16, 32]), by_block(16, 32, "_scale", torch.bfloat16)
    ),
    "ModelOpt": Written(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [f"*{name}" for name in LISTED]},
        by_tensor(()),
        {".input_scale": torch.ones(())},
    ),
    "ModelOpt, blocks": Written(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": [f"*{name}" for name in LISTED]},
        by_block(128, 128, "_scale", four=True),
    ),
}


def quantise(folder: Path, target: Path, written: Written, group: int = 1) -> tuple[Path, Path]:
    """Write a checkpoint in a tool's format, and the same numbers as float32; return the folders of both.

    Inputs of a quantised matrix are a multiple of `group`.
    """
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    small: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    count = 0
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim == 2 and name.endswith(".weight") and not WIDE.search(name)
        if not is_matrix or tensor.shape[1] % group:
            small[name] = wide[name] = tensor
            continue
        count += 1
        stored, wide[name] = written.write(tensor.float())
        parent = name.removesuffix(".weight")
        small |= {(parent if suffix[:1] == "." else name) + suffix: each for suffix, each in stored.items()}
        small |= {parent + suffix: each.clone() for suffix, each in written.extra.items()}
    assert count, "nothing was quantised"
    for path, content, more in (
        (target / "small", small, {"quantization_config": written.config}),
        (target / "wide", wide, {}),
    ):
        path.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | more))
    return target / "small", target / "wide"
