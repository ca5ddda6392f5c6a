"""Quantised checkpoints of tools that Weft does not read, refused by the names in their configuration.

It imports no tensors: such a folder is refused before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.base.errors import ModelError

ADVICE = (
    "use GGUF, compressed-tensors, GPTQ, AWQ or AutoRound weights of this model, or --quantize with its 16-bit ones"
)
# Tools by their own name of the method, without version numbers.
METHODS = {
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "exl2": "ExLlamaV2 (EXL2)",
    "exl3": "ExLlamaV3 (EXL3)",
    "mlx": "MLX",
}


def refuse(fields: Mapping[str, Any]) -> None:
    """Raise if a configuration is that of another tool."""
    method = fields.get("quant_method")
    # MLX states sizes and no method.
    is_mlx = method is None and "bits" in fields and "group_size" in fields
    tool = "MLX" if is_mlx else METHODS.get(method.lower()) if isinstance(method, str) else None
    if tool is not None:
        raise ModelError(refusal(tool))


def refusal(tool: str) -> str:
    return f"the weights are quantised by {tool}, which is not supported; {ADVICE}"
