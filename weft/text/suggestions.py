"""How a model's makers suggest to draw from it: what generation_config.json says, for callers who say nothing."""

from __future__ import annotations

from pathlib import Path

from weft.base.errors import ModelError, RequestError
from weft.base.sampling import SamplingParams
from weft.text.tokenizer import read_json

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def suggested_params(folder: Path) -> SamplingParams:
    """The usual parameters, with those in place of them that the model's folder names."""
    stated = read_json(folder / "generation_config.json")
    found = {name: stated[name] for name in NAMES if stated.get(name) is not None}
    try:
        return SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from None
