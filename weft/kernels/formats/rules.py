"""What each tool states about quantised matrices, in its own words: one reader for each, from fields to rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.base.errors import ModelError
from weft.kernels.formats.fields import block, count, mapping, names, text
from weft.kernels.formats.matching import (
    Matches,
    anything,
    contains,
    endings,
    except_for,
    parts,
    paths,
    starts,
    targets_of,
    wildcards,
)
from weft.kernels.formats.scheme import Statement

# Groups, and entries that are about single layers.
MOST_GROUPS, MOST_ENTRIES = 64, 100_000
# Expressions are tried one after another for every name.
MOST_PATTERNS = 1_000
# What patterns have and names do not.
SPECIAL = frozenset("*+?[(\\^$|")
# Bits of plain numbers.
WIDE_BITS = 16


@dataclass(frozen=True, slots=True)
class StatedRule:
    """Matrices by their names in the checkpoint, and what is stated about them; None: they are plain numbers."""

    matches: Matches
    statement: Statement | None


def transformers_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of transformers for FP8 and MXFP4: everything is quantised but what a list names."""
    method = fields["quant_method"]
    kept = [*names(fields, "modules_to_not_convert"), *names(fields, "ignored_layers")]
    yield StatedRule(paths(kept), None)
    yield StatedRule(
        paths(["experts"]) if method == "mxfp4" else anything,
        Statement(method, block=block(fields, "weight_block_size")),
    )


def compressed_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of compressed-tensors: groups of targets, and names that none of them holds."""
    yield StatedRule(targets_of(names(fields, "ignore")), None)
    groups = mapping(fields.get("config_groups"), "config_groups")
    if len(groups) > MOST_GROUPS:
        raise ModelError(f"quantization_config: config_groups must be at most {MOST_GROUPS}, got {len(groups)}")
    for group in groups.values():
        group = mapping(group, "config_groups")
        weights = group.get("weights")
        if weights is None:
            continue
        weights = mapping(weights, "weights")
        statement = Statement(
            "compressed-tensors",
            format=text(group.get("format") or fields.get("format")),
            kind=text(weights.get("type")),
            bits=count(weights.get("num_bits")),
            strategy=text(weights.get("strategy")),
            block=block(weights, "block_structure"),
            group=count(weights.get("group_size")),
            symmetric=weights.get("symmetric", True) is not False,
        )
        yield StatedRule(targets_of(names(group, "targets")), statement)


def modelopt_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of ModelOpt: an algorithm for all, or one for each name, and wildcards that exclude."""
    excluded = [*names(fields, "exclude_modules"), *names(fields, "ignore")]
    yield StatedRule(wildcards(excluded), None)
    algorithm = fields.get("quant_algo")
    layers = fields.get("quantized_layers")
    if layers is not None:
        listed: dict[Statement, list[str]] = {}
        for name, entry in entries(layers, "quantized_layers").items():
            own = Statement("modelopt", text(mapping(entry, "quantized_layers").get("quant_algo")))
            listed.setdefault(own, []).append(name)
        if len(listed) > MOST_GROUPS:
            raise ModelError(f"quantization_config: quantized_layers must name at most {MOST_GROUPS} algorithms")
        for statement, found in listed.items():
            yield StatedRule(paths(found), statement)
        return
    if algorithm is not None:
        yield StatedRule(anything, Statement("modelopt", text(algorithm)))


def gptq_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of GPTQ: one statement, patterns that change or exclude it, and what of a block is quantised."""
    statement = Statement(
        "gptq",
        format=text(fields.get("checkpoint_format") or fields.get("format") or "gptq"),
        kind="int",
        bits=count(fields.get("bits")),
        group=count(fields.get("group_size")),
        symmetric=fields.get("sym", True) is not False,
    )
    for pattern, entry in entries(fields.get("dynamic") or {}, "dynamic", MOST_PATTERNS).items():
        matches = starts(pattern.removeprefix("+:").removeprefix("-:"))
        own = None if pattern.startswith("-:") else changed(statement, mapping(entry or {}, "dynamic"))
        yield StatedRule(matches, own)
    inside = fields.get("modules_in_block_to_quantize") or []
    flat = [name for each in inside for name in (each if isinstance(each, list) else [each])] if inside else []
    if flat:
        listed = names({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")
        yield StatedRule(except_for(endings(listed)), None)
    yield StatedRule(anything, statement)


def awq_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of AWQ: one statement, and parts of names that are excluded."""
    yield StatedRule(parts(names(fields, "modules_to_not_convert")), None)
    statement = Statement(
        "awq",
        format=(text(fields.get("version")) or "gemm").lower(),
        kind="int",
        bits=count(fields.get("bits") or fields.get("w_bit")),
        group=count(fields.get("group_size") or fields.get("q_group_size")),
        symmetric=False,
    )
    yield StatedRule(anything, statement)


def autoround_rules(fields: Mapping[str, Any]) -> Iterable[StatedRule]:
    """Read the words of AutoRound: one statement in the packing of GPTQ or AWQ, and layers that differ from it."""
    packing = (text(fields.get("packing_format")) or "auto_round:auto_gptq").removeprefix("auto_round:")
    statement = Statement(
        "auto-round",
        format=AUTOROUND_PACKINGS.get(packing, packing),
        kind=text(fields.get("data_type")) or "int",
        bits=count(fields.get("bits")),
        group=count(fields.get("group_size")),
        symmetric=fields.get("sym", True) is not False and "awq" not in packing,
    )
    plain: dict[Statement | None, list[str]] = {}
    extra = entries(fields.get("extra_config") or {}, "extra_config")
    entries({name: None for name in extra if SPECIAL & set(name)}, "patterns of extra_config", MOST_PATTERNS)
    for name, entry in extra.items():
        own = changed(statement, mapping(entry, "extra_config"))
        if SPECIAL & set(name):
            yield StatedRule(contains(name), own)
        else:
            plain.setdefault(own, []).append(name)
    if len(plain) > MOST_GROUPS:
        raise ModelError(f"quantization_config: extra_config must have at most {MOST_GROUPS} different entries")
    for found, listed in plain.items():
        yield StatedRule(paths(listed), found)
    yield StatedRule(paths(names(fields, "modules_to_not_convert")), None)
    blocks = fields.get("block_name_to_quantize")
    if blocks:
        within = blocks.split(",") if isinstance(blocks, str) else blocks
        yield StatedRule(except_for(paths(names({"block_name_to_quantize": within}, "block_name_to_quantize"))), None)
    yield StatedRule(anything, statement)


AUTOROUND_PACKINGS = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "gemm", "awq": "gemm"}


def changed(statement: Statement, entry: Mapping[str, Any]) -> Statement | None:
    """Return what is stated of layers that an entry is about; None: they are plain numbers."""
    bits = count(entry.get("bits", statement.bits))
    if bits is not None and bits >= WIDE_BITS:
        return None
    symmetric = entry.get("sym", statement.symmetric) is not False and statement.symmetric
    group = count(entry["group_size"]) if entry.get("group_size") is not None else statement.group
    return replace(statement, bits=bits, group=group, symmetric=symmetric)


def entries(value: object, name: str, most: int = MOST_ENTRIES) -> Mapping[str, Any]:
    """Return entries by name, in their order."""
    found = mapping(value, name)
    if len(found) > most:
        raise ModelError(f"quantization_config: {name} must have at most {most} entries, got {len(found)}")
    names({name: list(found)}, name)
    return found


READERS: dict[str, Callable[[Mapping[str, Any]], Iterable[StatedRule]]] = {
    "fp8": transformers_rules,
    "mxfp4": transformers_rules,
    "compressed-tensors": compressed_rules,
    "modelopt": modelopt_rules,
    "gptq": gptq_rules,
    "awq": awq_rules,
    "auto-round": autoround_rules,
}
