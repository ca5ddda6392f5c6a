"""A model's suggested sampling parameters (generation_config.json), the defaults for requests that set none."""

from __future__ import annotations

from pathlib import Path

from weft.base.errors import ModelError, RequestError
from weft.base.sampling import SamplingParams
from weft.text.tokenizer import read_json

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def suggested_params(folder: Path) -> SamplingParams:
    """Return the default parameters, overridden by those in the model's folder."""
    stated = read_json(folder / "generation_config.json")
    found = {name: stated[name] for name in NAMES if stated.get(name) is not None}
    try:
        return SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from None
