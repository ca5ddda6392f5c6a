"""Configurations whose logits are kept: each family as it is, every rotary kind, and every field that it may leave out.

Fields are those that a family asks its configuration for while it is built, so a new one brings its own cases. Nothing
here depends on the public implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.models.hybrid_models import HYBRIDS, ODD_HYBRIDS
from tests.support.models.oracle import Tiny
from tests.support.models.plain_models import ODD_PLAIN, PLAIN
from weft.models.config import REQUIRED, Config, text_part
from weft.models.layers.mlp import ACTIVATIONS
from weft.models.weights import build

FAMILIES: dict[str, Tiny] = {**PLAIN, **HYBRIDS}
# How the names of odd configurations begin.
ODD = {**ODD_PLAIN, **ODD_HYBRIDS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn, other ramp": YARN | {"beta_fast": 3.0, "beta_slow": 0.4, "truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 1.7},
    "yarn, two scales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "half of each head": {"rope_type": "default", "partial_rotary_factor": 0.5},
}
THETA = {"rope_theta": 5000.0}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
# What positions are turned by is varied as a whole, above.
ROTARY_FIELDS = {
    "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    "rope_local_base_freq", "max_position_embeddings", "model_max_length",
}  # fmt: skip


def fields_of(tiny: Tiny) -> dict[str, Any]:
    """Return a configuration as config.json would store it. Missing fields take Weft's defaults."""
    fields = {**tiny.settings, "architectures": [tiny.model_class]} | tiny.published
    return text_part({name: value for name, value in fields.items() if value is not None})


def cases_of(family: str) -> dict[str, dict[str, Any]]:
    """Return configurations of a family by name. It may refuse some of them."""
    base = fields_of(FAMILIES[family])
    found = {"as it is": base}
    found |= {name: fields_of(tiny) for name, tiny in ODD.items() if begins_with(name, family)}
    if family == "granite_moe_hybrid":
        # The odd configuration has as many as the installed public implementation can compute.
        found["two groups"] = base | {"mamba_n_groups": 2}
        del found["granite, rope, groups, dt limits"]
        found["time_step_limit"] = base | {"time_step_limit": [0.03, 0.5]}
    found |= dict(rotated(family, base))
    found |= dict(varied(base))
    return found


def begins_with(name: str, family: str) -> bool:
    return name.split(",")[0] in (family, family.removesuffix("_moe_hybrid"))


def rotated(family: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a configuration for every rotary kind; old spellings, layer types and axes where they are known."""
    if family in ("kimi_linear", "nemotron_h"):
        return  # without positions
    base = {name: value for name, value in base.items() if name not in ("rope_parameters", "rope_scaling")}
    base |= {"position_embedding_type": "rope"} if family == "granite_moe_hybrid" else {}
    for name, settings in ROTARY.items():
        new = THETA | settings
        if family == "gemma3":
            yield f"rotary: {name}", base | {"rope_parameters": {"full_attention": new, "sliding_attention": THETA}}
            yield (
                f"rotary of windows: {name}",
                base | {"rope_parameters": {"full_attention": THETA, "sliding_attention": new}},
            )
        else:
            yield f"rotary: {name}", base | {"rope_parameters": new}
        if name in ("linear", "yarn"):
            yield f"rotary, old spelling: {name}", base | THETA | {"rope_scaling": settings}
        if family.startswith("qwen3_5"):
            yield f"rotary, sections: {name}", base | {"rope_parameters": new | SECTIONS}
    scaled = {"rope_type": "linear", "factor": 3.0}
    if family == "gemma3":
        yield "rotary: other local base", base | {"rope_local_base_freq": 7000.0}
        keyed = {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}
        yield "rotary: thetas outside", base | THETA | {"rope_local_base_freq": 70.0, "rope_parameters": keyed}
        yield "rotary: theta of one type outside", base | THETA | {"rope_parameters": keyed}
    else:
        yield "rotary: no theta", base | {"rope_parameters": scaled}
        yield "rotary: theta outside", base | THETA | {"rope_parameters": scaled}
        yield "rotary: null", base | {"rope_parameters": None}


Reading = tuple[str, tuple[str, ...], Any]


def varied(base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a configuration for each optional flag, number and choice that is read, with another value of it."""
    used = sorted(readings(base), key=str)
    for reader, names, default in used:
        if reader == "integer":
            continue
        if default is REQUIRED and not any(name in base for name in names):
            continue
        name = next((name for name in names if base.get(name) is not None), names[0])
        value = base.get(name, default)
        for other in other_values(reader, name, value):
            yield f"{name}: {other}", base | {name: other}
    if any("sliding_window" in names for _, names, _ in used):
        yield "sliding_window: 5", base | {"sliding_window": 5, "use_sliding_window": True}


def other_values(reader: str, name: str, value: Any) -> list[Any]:
    if reader == "flag":
        return [not value]
    if reader == "number":
        # An epsilon is compared with squares of about one.
        return [0.1 if name.endswith(("eps", "epsilon")) else 3.0 if value is None else 2.0 * value]
    if reader == "numbers":
        return [[2.0 * each for each in value]]
    return [each for each in ACTIVATIONS if each not in (value, "swish")]


def readings(fields: dict[str, Any]) -> set[Reading]:
    """Return how each optional field is read while a model is built."""
    found: set[Reading] = set()

    def noting(reader: str, original: Callable[..., Any]) -> Any:
        def read(self: Config, *names: str, **more: Any) -> Any:
            if not ROTARY_FIELDS & set(names):
                default = more.get("default", REQUIRED)
                found.add((reader, names, tuple(default) if isinstance(default, list) else default))
            return original(self, *names, **more)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for reader in ("flag", "number", "numbers", "choice", "integer"):
            patch.setattr(Config, reader, noting(reader, getattr(Config, reader)))
        build(fields, torch.float32, "meta")
    return found
