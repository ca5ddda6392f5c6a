"""Reader of a checkpoint's config.json: field by field, with errors that name the field.

It knows how configurations are spelled (old and new), not how families use them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError
from weft.kernels.rotary import VARIANTS, RotaryKind, yarn_scale
from weft.models.bounds import CONFIG_BYTES, INTEGERS, LAYERS, MOST_ENTRIES, MOST_SHOWN, NUMBERS


class Required:
    """Marker of a field without a default."""


REQUIRED = Required()
# Facts of the whole checkpoint that multimodal configurations keep outside their text part.
OUTER = ("architectures", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


def read_config(path: Path, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ModelError(f"{path} must have at most {most_bytes} bytes")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must contain a JSON object, got {type(config).__name__}")
    return config


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's own configuration; multimodal checkpoints nest it in `text_config`."""
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    outer = {name: config[name] for name in OUTER if config.get(name) is not None}
    return {**config["text_config"], **outer}


class Config:
    """Typed access to the fields of a configuration. Several names are spellings of one field, tried in order.

    `defaults` apply to fields that are absent, not to those that are null.
    """

    def __init__(self, fields: Mapping[str, Any], **defaults: Any) -> None:
        self.fields = {**defaults, **fields}

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        """Return the spelling that exists and its value, or the first spelling and the default."""
        for name in names:
            if self.fields.get(name) is not None:
                return name, self.fields[name]
        if default is REQUIRED:
            raise ModelError(f"config.json must have {' or '.join(names)} for this architecture, but has none")
        return names[0], default

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        name, value = self._find(names, default)
        if value is default:
            return value
        most = INTEGERS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= most:
            raise ModelError(f"config.json: {name} must be an integer from {minimum} to {most}, got {shown(value)}")
        return value

    def number(self, *names: str, default: Any = REQUIRED) -> Any:
        name, value = self._find(names, default)
        return value if value is default else _number(name, value)

    def numbers(self, *names: str, length: int, default: Any = REQUIRED) -> list[float]:
        name, value = self._find(names, default)
        return value if value is default else [_number(name, each) for each in self.listing(*names, length=length)]

    def flag(self, *names: str, default: Any = REQUIRED) -> bool:
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, got {shown(value)}")
        return value

    def choice(self, *names: str, among: Mapping[str, Any] | tuple[str, ...], default: Any = REQUIRED) -> str:
        name, value = self._find(names, default)
        if not isinstance(value, str) or value not in among:
            raise ModelError(f"config.json: {name} must be one of {', '.join(among)}, got {shown(value)}")
        return value

    def listing(self, *names: str, length: int | None = None, default: Any = REQUIRED) -> list[Any]:
        name, value = self._find(names, default)
        if not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {name} must be a list, got {shown(value)}")
        if length is not None and len(value) != length:
            raise ModelError(f"config.json: {name} must have {length} entries, got {len(value)}")
        if len(value) > MOST_ENTRIES:
            raise ModelError(f"config.json: {name} must have at most {MOST_ENTRIES} entries, got {len(value)}")
        return list(value)

    def kinds(self, name: str, given: Sequence[Any], known: Mapping[str, str]) -> list[str]:
        """Return the kinds of layers that a field lists, in Weft's names: `known` maps the file's names to them."""
        if len(given) > LAYERS:
            raise ModelError(f"config.json: {name} must have at most {LAYERS} entries, got {len(given)}")
        for spelling in given:
            if not isinstance(spelling, str) or spelling not in known:
                raise ModelError(f"config.json: {name} has {shown(spelling)}; known values are {', '.join(known)}")
        return [known[spelling] for spelling in given]

    def experts_per_token(self, count: int) -> int:
        """Return how many of `count` experts a token goes to."""
        chosen: int = self.integer("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
        if chosen > count:
            raise ModelError(f"config.json: num_experts_per_tok must be at most num_experts {count}, got {chosen}")
        return chosen

    @property
    def head_dim(self) -> int:
        """Return the given head size, or the hidden size divided by the number of heads."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if self.fields.get("head_dim") is None and hidden % heads:
            raise ModelError(f"config.json: hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
        size: int = self.integer("head_dim", default=hidden // heads)
        return size

    @property
    def context(self) -> int | None:
        """Return how many tokens the model was trained for, if the configuration has it."""
        length: int | None = self.integer("max_position_embeddings", "model_max_length", default=None)
        return length

    @property
    def kv_heads(self) -> int:
        heads = self.integer("num_attention_heads")
        kv_heads: int = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        return kv_heads

    def layer_types(self, known: Mapping[str, str], default: list[str] | None = None) -> list[str]:
        """Return `layer_types` in Weft's names: `known` maps the file's names to them."""
        count = self.integer("num_hidden_layers")
        types = self.listing("layer_types", length=count, default=default if default is not None else REQUIRED)
        return self.kinds("layer_types", types, known)

    def rotary(self, layer_type: str | None = None, theta: float = 10000.0, partial: float = 1.0) -> RotaryKind:
        """Return the rotary embedding of (a type of) layers; `theta` and `partial` are the family's defaults."""
        settings = self._rotary_settings(layer_type)
        scope = Config(settings)
        variant = settings.get("rope_type", settings.get("type")) or "default"
        if variant == "mrope" or "mrope_section" in settings:
            # Three axes of positions; all equal for text, which is plain rotation.
            variant = "default"
        if variant not in VARIANTS:
            raise ModelError(
                f"config.json: rope type {shown(variant)} is not supported; supported are {', '.join(VARIANTS)}"
            )
        share = scope.number("partial_rotary_factor", default=partial)
        needs_original = variant in ("llama3", "yarn")
        context = self.context
        original = scope.integer("original_max_position_embeddings", default=context)
        if needs_original and original is None:
            raise ModelError(f"config.json: rope type {variant} needs original_max_position_embeddings")
        return RotaryKind(
            size=turned_dimensions(self.head_dim, share),
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
        """Return one dictionary from the new spelling (`rope_parameters`) or the old one (`rope_scaling` etc.)."""
        new, scaling = (self.fields.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        if not isinstance(scaling, Mapping) or not isinstance(new, Mapping):
            raise ModelError("config.json: rope_parameters and rope_scaling must be objects")
        if layer_type is not None and isinstance(new.get(layer_type), Mapping):
            new = new[layer_type]
        old = {name: self.fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in self.fields}
        settings = {**old, **scaling, **new}
        return {name: value for name, value in settings.items() if value is not None}


def turned_dimensions(head_dim: int, share: float = 1.0) -> int:
    """Return how many dimensions of a head a rotary embedding rotates: an even number."""
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise ModelError(
            f"config.json: the number of rotated dimensions of a head must be even, got {size} "
            f"(head_dim {head_dim}, partial_rotary_factor {share:g})"
        )
    return size


def _number(name: str, value: Any) -> float:
    low, high = NUMBERS[name]
    # NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelError(f"config.json: {name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """Return a value from a file for one line of a message, however long or deep it is."""
    return _short.repr(value)[:MOST_SHOWN]


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong = 3, MOST_SHOWN, MOST_SHOWN


def _attention_factor(scope: Config) -> float | None:
    given: float | None = scope.number("attention_factor", default=None)
    weights = [scope.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if given is not None or not all(weights):
        return given
    factor = scope.number("factor", default=1.0)
    return yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
