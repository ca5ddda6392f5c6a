"""A model's suggested sampling parameters (generation_config.json), the defaults for requests that set none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError, RequestError
from weft.base.gguf.header import is_gguf, read_header
from weft.base.sampling import SamplingParams
from weft.text.tokenizer import read_json

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# The same in GGUF files, after "general.sampling.".
KEYS = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")


def suggested_params(folder: Path) -> SamplingParams:
    """Return the default parameters, overridden by those in the model's folder."""
    if is_gguf(folder):
        metadata = read_header(folder).metadata
        stated: Mapping[str, Any] = {name: metadata.get(f"general.sampling.{key}") for name, key in zip(NAMES, KEYS)}
    else:
        stated = read_json(folder / "generation_config.json")
    found = {name: stated[name] for name in NAMES if stated.get(name) is not None}
    try:
        return SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder if is_gguf(folder) else folder / 'generation_config.json'}: {error}") from None
