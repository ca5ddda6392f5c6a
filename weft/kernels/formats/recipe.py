"""Which matrices of a checkpoint are quantised, and how: `quantization_config` in the words of each tool."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import ModelError
from weft.kernels.formats import block_types, fp8, mxfp4
from weft.kernels.formats.scheme import Scheme, Spelling, Statement
from weft.kernels.formats.stored import DENSE, Format

FORMATS = (fp8, mxfp4, block_types)
SPELLINGS: tuple[Spelling, ...] = tuple(spelling for format in FORMATS for spelling in format.SPELLINGS)
STATED = tuple(sorted({spelling.kind for spelling in SPELLINGS if spelling.is_stated}))
# Scales of activations and of cached keys and values, which stay 16 bits wide here, and sizes that others say as well.
LEFT_OUT = re.compile(
    r"(\.(input_scale|activation_scale|qscale_act|input_global_scale|[qkv]_scale|weight_shape)|_input_scale)$"
)
# Matrices that tools leave in 16 bits whether or not a list says so.
WIDE = re.compile(
    r"(^|\.)(embed\w*|\w*embeddings?|lm_head|output|gate|router|shared_expert_gate|\w*conv\w*|\w*norm\w*)$"
)
# A repeated group may take forever, and so may many repetitions after each other.
REPEATED_GROUP = re.compile(r"\)[*+{]")
MOST_REPETITIONS = 4
# Groups, and names in lists.
MOST_GROUPS, MOST_NAMES, MOST_CHARACTERS = 64, 100_000, 500

Matches = Callable[[str], bool]


def is_wide(name: str) -> bool:
    """Return whether tools leave a module in 16 bits whether or not a list says so."""
    return WIDE.search(name) is not None


def claimed(statement: Statement) -> Scheme | None:
    """Return what a statement means; None: no format here is that."""
    found: list[Scheme | None] = [format.claim(statement) for format in FORMATS]
    return next((scheme for scheme in found if scheme is not None), None)


@dataclass(frozen=True, slots=True)
class StatedRule:
    """Matrices by their names in the checkpoint, and what is stated about them; None: they are plain numbers."""

    matches: Matches
    statement: Statement | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a configuration states, rule by rule: the first that matches a name counts."""

    rules: tuple[StatedRule, ...] = ()

    def scheme_of(self, name: str) -> Scheme | None:
        """Return how a module's matrix is quantised by its name in the checkpoint; raise if no format here is that."""
        statement = next((rule.statement for rule in self.rules if rule.matches(name)), None)
        if statement is None:
            return None
        scheme = claimed(statement)
        if scheme is None:
            raise ModelError(
                f"{name} is quantised as {statement}, which is not supported; use weights in "
                f"{', '.join(STATED)} or 16 bits"
            )
        return scheme

    def format_of(self, name: str, outputs: int, inputs: int) -> Format:
        """Return the format that a matrix of this size would have in a checkpoint."""
        scheme = None if is_wide(name) else self.scheme_of(name)
        found = [format.of(scheme, outputs, inputs) for format in FORMATS] if scheme is not None else []
        return next((each for each in found if each is not None), DENSE)


def recipe_of(stated: object, beside: object = None) -> Recipe:
    """Return the rules of `quantization_config`, or without one those of `hf_quant_config.json` beside it."""
    if not stated and beside:
        stated = _mapping(_mapping(beside, "hf_quant_config.json").get("quantization"), "hf_quant_config.json")
        stated = {"quant_method": "modelopt", **stated}
    if not stated:
        return Recipe()
    fields = _mapping(stated, "config.json")
    method = fields.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(
            f"quantization_config: quant_method {_shown(method)} is not supported; use {', '.join(READERS)}"
        )
    return Recipe(tuple(reader(fields)))


def transformers_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of transformers for FP8 and MXFP4: everything is quantised but what a list names."""
    method = fields["quant_method"]
    names = [*_names(fields, "modules_to_not_convert"), *_names(fields, "ignored_layers")]
    yield StatedRule(paths(names), None)
    yield StatedRule(
        paths(["experts"]) if method == "mxfp4" else anything,
        Statement(method, block=_block(fields, "weight_block_size")),
    )


def compressed_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of compressed-tensors: groups of targets, and names that none of them holds."""
    yield StatedRule(targets_of(_names(fields, "ignore")), None)
    groups = _mapping(fields.get("config_groups"), "config_groups")
    if len(groups) > MOST_GROUPS:
        raise ModelError(f"quantization_config: config_groups must be at most {MOST_GROUPS}, got {len(groups)}")
    for group in groups.values():
        group = _mapping(group, "config_groups")
        weights = group.get("weights")
        if weights is None:
            continue
        weights = _mapping(weights, "weights")
        statement = Statement(
            "compressed-tensors",
            format=_text(group.get("format") or fields.get("format")),
            kind=_text(weights.get("type")),
            bits=_count(weights.get("num_bits")),
            strategy=_text(weights.get("strategy")),
            block=_block(weights, "block_structure"),
            group=_count(weights.get("group_size")),
        )
        yield StatedRule(targets_of(_names(group, "targets")), statement)


def modelopt_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of ModelOpt: an algorithm for all, or one for each name, and wildcards that exclude."""
    excluded = [*_names(fields, "exclude_modules"), *_names(fields, "ignore")]
    yield StatedRule(wildcards(excluded), None)
    algorithm = fields.get("quant_algo")
    layers = fields.get("quantized_layers")
    if layers is not None:
        named = {
            name: _mapping(entry, "quantized_layers") for name, entry in _mapping(layers, "quantized_layers").items()
        }
        by_name = {name: Statement("modelopt", _text(entry.get("quant_algo"))) for name, entry in named.items()}
        for statement in dict.fromkeys(by_name.values()):
            yield StatedRule(paths([name for name, each in by_name.items() if each == statement]), statement)
        return
    if algorithm is not None:
        yield StatedRule(anything, Statement("modelopt", _text(algorithm)))


READERS: dict[str, Callable[[Mapping[str, Any]], Iterable[StatedRule]]] = {
    "fp8": transformers_rules,
    "mxfp4": transformers_rules,
    "compressed-tensors": compressed_rules,
    "modelopt": modelopt_rules,
}


def anything(name: str) -> bool:
    return True


def paths(texts: Sequence[str]) -> Matches:
    """Match modules and everything in them, by a path that may begin anywhere; `*` stands for anything.

    >>> [paths(["mlp.gate"])(name) for name in ("a.mlp.gate", "a.mlp.gate.x", "a.mlp.gate_proj", "mlp.gate")]
    [True, True, False, True]
    """
    plain = frozenset(text.strip(".") for text in texts if "*" not in text)
    patterns = [_path(text) for text in texts if "*" in text]

    def matches(name: str) -> bool:
        ends = [*(match.start() for match in re.finditer(r"\.", name)), len(name)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        if any(name[start:end] in plain for start in starts for end in ends if start < end):
            return True
        return any(pattern.search(name) for pattern in patterns)

    return matches


def _path(text: str) -> re.Pattern[str]:
    first, *between, last = (re.escape(part) for part in text.strip(".").split("*"))
    # What stands between two wildcards is found once and never elsewhere, so that many of them take no longer.
    middle = "".join(f"(?>.*?{part})" for part in between)
    return re.compile(rf"(^|\.){first}{middle}.*{last}(\.|$)")


def targets_of(texts: Sequence[str]) -> Matches:
    """Match by a class (`Linear`: every matrix), by regular expressions after `re:`, or by names."""
    if "Linear" in texts:
        return anything
    expressions = [_expression(text[3:]) for text in texts if text.startswith("re:")]
    named = paths([text for text in texts if not text.startswith("re:")])
    return lambda name: named(name) or any(expression.match(name) for expression in expressions)


def _expression(text: str) -> re.Pattern[str]:
    try:
        if REPEATED_GROUP.search(text) or len(re.findall(r"[*+{]", text)) > MOST_REPETITIONS:
            raise ValueError(f"it repeats a group, or has more than {MOST_REPETITIONS} repetitions")
        return re.compile(text)
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ModelError(f"quantization_config: {_shown(text)} is not a regular expression to use: {error}") from error


def wildcards(texts: Sequence[str]) -> Matches:
    """Match whole names, or those of modules that hold them.

    >>> [wildcards(["model.layers.*.mixer"])(name) for name in ("model.layers.3.mixer.q_proj", "model.norm")]
    [True, False]
    """
    patterns = [re.compile(fnmatch.translate(text)) for text in texts]

    def matches(name: str) -> bool:
        ends = [*(match.start() for match in re.finditer(r"\.", name)), len(name)]
        return any(pattern.match(name[:end]) for pattern in patterns for end in ends)

    return matches


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"quantization_config: {name} must be an object, got {_shown(value)}")
    return value


def _names(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    valid = isinstance(value, list) and len(value) <= MOST_NAMES
    if not valid or not all(isinstance(each, str) and len(each) <= MOST_CHARACTERS for each in value):
        raise ModelError(f"quantization_config: {name} must be a list of names, got {_shown(value)}")
    return list(value)


def _block(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if value is None:
        return None
    sizes = [_count(each) for each in value] if isinstance(value, list) else []
    if len(sizes) != 2 or None in sizes:
        raise ModelError(f"quantization_config: {name} must be two sizes, got {_shown(value)}")
    return sizes[0] or 1, sizes[1] or 1


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20 else None


def _text(value: object) -> str | None:
    return value[:100] if isinstance(value, str) else None


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:100]
