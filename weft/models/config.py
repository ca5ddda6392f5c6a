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
from weft.base.gguf.header import is_gguf, read_header
from weft.kernels.rotary import VARIANTS, RotaryKind, yarn_scale
from weft.models.bounds import CONFIG_BYTES, INTEGERS, LAYERS, MOST_ENTRIES, MOST_SHOWN, NUMBERS


class Required:
    """Marker of a field without a default."""


REQUIRED = Required()
# Facts of the whole checkpoint that multimodal configurations keep outside their text part.
OUTER = (
    "architectures",
    "tie_word_embeddings",
    "id2label",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "compression_config",
)
# Types of layers without recurrence, and Weft's names of them.
WINDOWED = {"full_attention": "full", "sliding_attention": "sliding"}


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


def checkpoint_config(place: Path) -> dict[str, Any]:
    """Return the configuration of a folder, of a file with one, or of a GGUF file."""
    if is_gguf(place):
        from weft.models.gguf.configuration import config_of

        return config_of(read_header(place))
    return read_config(place if place.is_file() else place / "config.json")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's own configuration; multimodal checkpoints nest it in `text_config`.

    Whether the embedding is also the head is said outside of it; the public implementation ignores it inside.
    """
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    inner = {name: value for name, value in config["text_config"].items() if name != "tie_word_embeddings"}
    return {**inner, **{name: config[name] for name in OUTER if config.get(name) is not None}}


class Config:
    """Typed access to the fields of a configuration. Several names are spellings of one field, tried in order.

    `defaults` apply to fields that are absent, not to those that are null.
    """

    def __init__(self, fields: Mapping[str, Any], **defaults: Any) -> None:
        self.fields = {**defaults, **fields}

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        """Return the spelling that exists and its value, or the first spelling and the default."""
        given = [name for name in names if self.fields.get(name) is not None]
        for name in given[1:]:
            if self.fields[name] != self.fields[given[0]]:
                raise ModelError(
                    f"config.json: {given[0]} is {shown(self.fields[given[0]])}, but {name}, which means the same, is "
                    f"{shown(self.fields[name])}; remove one of them"
                )
        if given:
            return given[0], self.fields[given[0]]
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

    def only(self, **values: Any) -> None:
        """Raise if a field that would change the computation has another value than the only supported one."""
        for name, value in values.items():
            given = self.integer(name, default=None) if name in INTEGERS else self.fields.get(name)
            if given is not None and (type(given) is not type(value) or given != value):
                raise ModelError(
                    f"config.json: {name} must be {json.dumps(value)} for this architecture, got {shown(given)}"
                )

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
        length: int | None = self.integer("max_position_embeddings", default=None)
        if length is None:
            length = self.integer("model_max_length", default=None)
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

    def window(self, is_windowed: bool) -> int | None:
        """Return the sliding window of a layer that has one."""
        window: int | None = self.integer("sliding_window") if is_windowed else None
        return window

    def check_layer_types(self, expected: Sequence[str], why: str, known: Mapping[str, str] = WINDOWED) -> None:
        """Raise if `layer_types` are given, and are not those that other fields or the architecture say."""
        if self.fields.get("layer_types") is None:
            return
        given = self.layer_types(known)
        if given != self.kinds("layer_types", expected, known):
            raise ModelError(f"config.json: layer_types must agree with {why}, got {shown(given)}")

    def layer_types(self, known: Mapping[str, str], default: list[str] | None = None) -> list[str]:
        """Return `layer_types` in Weft's names: `known` maps the file's names to them."""
        count = self.integer("num_hidden_layers")
        types = self.listing("layer_types", length=count, default=default if default is not None else REQUIRED)
        return self.kinds("layer_types", types, known)

    def rotary(
        self,
        layer_type: str | None = None,
        theta: float = 10000.0,
        theta_field: str = "rope_theta",
        partial: float | None = None,
        axes: bool = False,
    ) -> RotaryKind:
        """Return the rotary embedding of (a type of) layers, as the public implementation reads it.

        `theta` and `partial` are the family's defaults; without `partial`, it rotates whole heads. `theta_field` is the
        name of theta outside of the parameters. `axes`: positions may have several axes. All are equal for text, so
        their sections change nothing.
        """
        settings = self.rotary_settings(layer_type, theta_field)
        scope, variant = Config(settings), settings.get("rope_type", "default")
        if variant not in VARIANTS:
            raise ModelError(
                f"config.json: rope type {shown(variant)} is not supported; supported are {', '.join(VARIANTS)}"
            )
        known = {*ROTARY_FIELDS, *VARIANT_FIELDS[variant], *(AXES_FIELDS if axes else ())}
        # The public implementation does not read it where layers have parameters of their own.
        known -= {"truncate"} if layer_type is not None else set()
        for name in settings:
            if name not in known:
                raise ModelError(
                    f"config.json: rope type {variant} of this architecture has no {shown(name)}; remove it"
                )
        share = scope.number("partial_rotary_factor", default=1.0 if partial is None else partial)
        if partial is None and share != 1:
            raise ModelError(f"config.json: partial_rotary_factor must be 1 for this architecture, got {share:g}")
        size, theta = turned_dimensions(self.head_dim, share), scope.number("rope_theta", default=theta)
        if axes:
            check_axes(scope)
        return scaled_rotary(variant, scope, size, theta, self.context)

    def rotary_settings(self, layer_type: str | None, theta_field: str) -> dict[str, Any]:
        """Return the parameters of the new spelling (`rope_parameters`) or the old one (`rope_scaling` etc.).

        A parameter may be given at several places if it has one value.
        """
        new, old = (self._mapping(name) for name in ("rope_parameters", "rope_scaling"))
        outer = _given(
            {
                "rope_theta": self.number(theta_field, default=None),
                "partial_rotary_factor": self.number("partial_rotary_factor", default=None),
                "original_max_position_embeddings": self.integer("original_max_position_embeddings", default=None),
            }
        )
        nested = [name for name, value in new.items() if isinstance(value, Mapping)]
        if layer_type is None and nested:
            raise ModelError(f"config.json: rope_parameters must not have {shown(nested[0])} for this architecture")
        if layer_type is not None:
            if len(nested) != len(new):
                raise ModelError(
                    "config.json: rope_parameters must have an object for each type of layers, and no more"
                )
            if "original_max_position_embeddings" in outer:
                raise ModelError("config.json: original_max_position_embeddings must be in rope_parameters")
            new = new.get(layer_type, {})
            # The old spelling has no scale for layers with a window.
            old = old if layer_type == "full_attention" else {}
        places = [{**outer, **_spelled(place)} for place in (new, old) if place] or [outer]
        if len(places) > 1 and places[0] != places[1]:
            raise ModelError("config.json: rope_parameters and rope_scaling must be the same, or one of them absent")
        for name, value in outer.items():
            if places[0][name] != value:
                raise ModelError(
                    f"config.json: {theta_field if name == 'rope_theta' else name} is {shown(value)}, but the rotary "
                    f"parameters have {shown(places[0][name])}; remove one of them"
                )
        return places[0]

    def _mapping(self, name: str) -> dict[str, Any]:
        value = self.fields.get(name) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {name} must be an object, got {shown(value)}")
        return _given(value)


# Parameters of rotary embeddings: of all types, of each type, and of positions with several axes.
ROTARY_FIELDS = (
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)
VARIANT_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
AXES_FIELDS = ("mrope_section", "mrope_interleaved")


def scaled_rotary(variant: str, scope: Config, size: int, theta: float, context: int | None) -> RotaryKind:
    """Return a type of rotary embedding with the parameters that it has."""
    if variant == "default":
        return RotaryKind(size, theta)
    if context is None:
        raise ModelError(f"config.json: rope type {variant} needs max_position_embeddings")
    if variant in ("linear", "dynamic"):
        return RotaryKind(size, theta, variant, scope.number("factor"))
    original = scope.integer("original_max_position_embeddings", default=context)
    if variant == "llama3":
        low, high = scope.number("low_freq_factor"), scope.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"config.json: high_freq_factor must be larger than low_freq_factor {low:g}, got {high:g}")
        return RotaryKind(size, theta, variant, scope.number("factor"), original, low, high)
    factor = scope.number("factor", default=REQUIRED if context == original else context / original)
    return RotaryKind(
        size,
        theta,
        variant,
        factor,
        original,
        fast=scope.number("beta_fast", default=32.0),
        slow=scope.number("beta_slow", default=1.0),
        truncate=scope.flag("truncate", default=True),
        attention_factor=_attention_factor(scope, factor),
    )


def check_axes(scope: Config) -> None:
    """Raise if the sections of positions with three axes are none."""
    sections = scope.listing("mrope_section", length=3, default=[0, 0, 0])
    if not all(type(size) is int and size >= 0 for size in sections):
        raise ModelError(f"config.json: mrope_section must have three sizes, got {shown(sections)}")
    scope.flag("mrope_interleaved", default=True)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _spelled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with the type under its new name."""
    settings = _given(settings)
    # For text, positions with several axes are plain rotation.
    kinds = ["default" if settings[name] == "mrope" else settings[name] for name in _TYPES if name in settings]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise ModelError(
            f"config.json: rope_type is {shown(kinds[0])}, but type is {shown(kinds[1])}; remove one of them"
        )
    kind = kinds[0] if kinds else "default"
    return {name: value for name, value in settings.items() if name not in _TYPES} | {"rope_type": kind}


_TYPES = ("rope_type", "type")


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


def _attention_factor(scope: Config, factor: float) -> float | None:
    given: float | None = scope.number("attention_factor", default=None)
    weights = [scope.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if given is not None or not all(weights):
        return given
    return yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
