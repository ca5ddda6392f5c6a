"""Reading a checkpoint's config.json: field by field, with errors that name the field.

Knows how configurations are spelled (old and new), not what any family does with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError
from weft.kernels.rotary import VARIANTS, RotaryKind, yarn_scale


class Required:
    """Marks a field without a default."""


REQUIRED = Required()
# Facts of the whole checkpoint that multimodal configurations keep outside of their text part.
OUTER = ("architectures", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own configuration; multimodal checkpoints nest it in `text_config`."""
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    outer = {name: config[name] for name in OUTER if config.get(name) is not None}
    return {**config["text_config"], **outer}


class Config:
    """Typed access to the fields of a configuration. Several names are spellings of one field, tried in order.

    `defaults` stand for fields that are absent, not for those that are null.
    """

    def __init__(self, fields: Mapping[str, Any], **defaults: Any) -> None:
        self.fields = {**defaults, **fields}

    def _find(self, names: tuple[str, ...], default: object) -> Any:
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        if default is REQUIRED:
            raise ModelError(f"config.json has no {' or '.join(names)}, which this architecture needs")
        return default

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        value = self._find(names, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"config.json: {names[0]} must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, *names: str, default: Any = REQUIRED) -> Any:
        value = self._find(names, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {names[0]} must be a number, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: Any = REQUIRED) -> bool:
        value = self._find(names, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {names[0]} must be true or false, got {value!r}")
        return value

    def choice(self, *names: str, among: Mapping[str, Any] | tuple[str, ...], default: Any = REQUIRED) -> str:
        value = self._find(names, default)
        if value not in among:
            raise ModelError(f"config.json: {names[0]} must be one of {', '.join(among)}, got {value!r}")
        return str(value)

    def listing(self, *names: str, length: int | None = None, default: Any = REQUIRED) -> list[Any]:
        value = self._find(names, default)
        if not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {names[0]} must be a list, got {value!r}")
        if length is not None and len(value) != length:
            raise ModelError(f"config.json: {names[0]} must have {length} entries, got {len(value)}")
        return list(value)

    @property
    def head_dim(self) -> int:
        """Given, or the hidden size shared among the heads."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if self.fields.get("head_dim") is None and hidden % heads:
            raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        return self.integer("head_dim", default=hidden // heads)

    @property
    def kv_heads(self) -> int:
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        return kv_heads

    def layer_types(self, known: Mapping[str, str], default: list[str] | None = None) -> list[str]:
        """`layer_types` in our own words: `known` maps spellings to them."""
        count = self.integer("num_hidden_layers")
        types = self.listing("layer_types", length=count, default=default if default is not None else REQUIRED)
        for spelling in types:
            if spelling not in known:
                raise ModelError(f"config.json: layer_types holds {spelling!r}, known are {', '.join(known)}")
        return [known[spelling] for spelling in types]

    def rotary(self, layer_type: str | None = None, theta: float = 10000.0, partial: float = 1.0) -> RotaryKind:
        """The rotary embedding of (a type of) layers; `theta` and `partial` are the family's defaults."""
        settings = self._rotary_settings(layer_type)
        scope = Config(settings)
        variant = str(settings.get("rope_type", settings.get("type")) or "default")
        if variant == "mrope" or "mrope_section" in settings:
            # Three axes of positions; all equal for text, which is plain rotation.
            variant = "default"
        if variant not in VARIANTS:
            raise ModelError(f"config.json: rope type {variant!r} is not supported; known are {', '.join(VARIANTS)}")
        share = scope.number("partial_rotary_factor", default=partial)
        needs_original = variant in ("llama3", "yarn")
        context = self.integer("max_position_embeddings", default=None)
        original = scope.integer("original_max_position_embeddings", default=context)
        if needs_original and original is None:
            raise ModelError(f"config.json: rope type {variant} needs original_max_position_embeddings")
        return RotaryKind(
            size=int(self.head_dim * share),
            theta=scope.number("rope_theta", default=theta),
            variant=variant,
            factor=scope.number("factor", default=(context or 1) / (original or 1)),
            original_context=original or 0,
            low_frequency=scope.number("low_freq_factor", default=1.0),
            high_frequency=scope.number("high_freq_factor", default=4.0),
            fast=scope.number("beta_fast", default=32.0),
            slow=scope.number("beta_slow", default=1.0),
            truncate=scope.flag("truncate", default=True),
            attention_factor=_attention_factor(scope),
        )

    def _rotary_settings(self, layer_type: str | None) -> dict[str, Any]:
        """One dictionary out of the new spelling (`rope_parameters`) or the old one (`rope_scaling` and friends)."""
        new = self.fields.get("rope_parameters") or {}
        if layer_type is not None and isinstance(new.get(layer_type), Mapping):
            new = new[layer_type]
        old = {name: self.fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in self.fields}
        scaling = self.fields.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping) or not isinstance(new, Mapping):
            raise ModelError("config.json: rope_parameters and rope_scaling must be objects")
        settings = {**old, **scaling, **new}
        return {name: value for name, value in settings.items() if value is not None}


def _attention_factor(scope: Config) -> float | None:
    given = scope.number("attention_factor", default=None)
    weights = [scope.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if given is not None or not all(weights):
        return given
    factor = scope.number("factor", default=1.0)
    return yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
