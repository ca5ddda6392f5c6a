"""Data types of weights, by their names in options and configurations."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.base.errors import ModelError
from weft.models.config import checkpoint_config, shown, text_part

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(asked: str, folder: Path) -> torch.dtype:
    """Return the requested dtype, or the checkpoint's, or float32."""
    if asked != "auto":
        return DTYPES[asked]
    config = checkpoint_config(folder)
    stated = text_part(config).get("dtype") or text_part(config).get("torch_dtype")
    stated = stated or config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(stated, str) or stated not in DTYPES:
        raise ModelError(f"config.json has dtype {shown(stated)}; set dtype to one of {', '.join(DTYPES)}")
    return DTYPES[stated]
