"""Every number that a family reads from config.json has a bound, which is checked before anything is built.

The fields come from two places: from the sources of the families, and from what each family reads while it is built. A
field that is read without a bound fails here, and so do a bound that no family needs and one that was raised.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fences import ROOT, parse
from tests.support.models.config_fields import fields_of
from tests.support.models.engines import FAMILIES
from weft.base.errors import ModelError
from weft.base.grid import CELL
from weft.models.bounds import INTEGERS, NUMBERS
from weft.models.config import ROTARY_FIELDS, VARIANT_FIELDS, Config
from weft.models.weights import load_model

READERS = {"integer": INTEGERS, "number": NUMBERS, "numbers": NUMBERS}
# The largest bound that a kind of field may have, by its name: what one more of it costs decides.
LARGEST_INTEGERS = {
    r"conv|_L_cache": CELL // 2,
    r"mamba_expand": 64,
    r"layers|interval|pattern|sparse_step|dense_replace|layer_freq": 1024,
    r"heads|head_dim|d_head|d_state|state_size|groups$": 4096,
    r"experts|_group$": 4096,
    r"hidden_size|latent_size|lora_rank": 1 << 17,
    r"intermediate|ff_dim|multiple_of|d_ssm": 1 << 20,
    r"vocab_size": 1 << 22,
    # Positions are 32-bit integers, and none is allocated for.
    r"position|sliding_window$|max_length": 1 << 30,
}
# Smallest and largest: what is divided by must not be zero, and products of these must be finite.
LARGEST_NUMBERS = {
    r"eps": (0.0, 1.0),
    r"partial_rotary_factor": (1e-3, 1.0),
    r"dim_multiplier": (1e-3, 64.0),
    r"theta|base_freq": (2.0, 1e12),
    r"^factor$": (1e-3, 1e6),
    r"mscale": (0.0, 1e6),
    r"embedding|soft|scaling$|pre_attn|limit|attention_factor|(freq|long|short)_factor|beta": (1e-6, 1e6),
    r"multiplier|scaling_factor|alpha": (-1e6, 1e6),
}


def kind_of(name: str, kinds: dict[str, Any]) -> Any:
    """Return the entry of the first kind that a field's name belongs to."""
    return next(entry for pattern, entry in kinds.items() if re.search(pattern, name))


# what is read ---------------------------------------------------------------------------------------------------------


def read_by_sources() -> Iterator[tuple[str, str]]:
    """Yield how (`integer`, `number` or `numbers`) and under which name the sources of families read a field."""
    folder = ROOT / "weft" / "models"
    # The keys of GGUF files become fields of a configuration, which are read as those of others.
    for path in sorted({*folder.rglob("*.py")} - {*(folder / "gguf").rglob("*.py")}):
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                yield from ((node.func.attr, name) for name in names)


@cache
def read_by(family: str) -> frozenset[tuple[str, tuple[str, ...], int]]:
    """Return how each field is read while a family is built, with all its spellings; lists with their length."""
    found: set[tuple[str, tuple[str, ...], int]] = set()
    with pytest.MonkeyPatch.context() as patch:
        for reader in READERS:
            patch.setattr(Config, reader, noting(reader, getattr(Config, reader), found))
        build(fields_of(family))
    return frozenset(found)


def noting(reader: str, original: Callable[..., Any], found: set[tuple[str, tuple[str, ...], int]]) -> Any:
    def read(self: Config, *names: str, **more: Any) -> Any:
        found.add((reader, names, more.get("length", 0)))
        return original(self, *names, **more)

    return read


def build(fields: dict[str, Any]) -> None:
    folder = Path(_folder().name)
    (folder / "config.json").write_text(json.dumps(fields))
    load_model(folder / "config.json", torch.float32, weights="dummy", progress=False)


@cache
def _folder() -> Any:
    from tempfile import TemporaryDirectory

    return TemporaryDirectory()


def test_every_field_that_is_read_has_a_bound_and_every_bound_a_field():
    read = set(read_by_sources())
    read |= {(reader, name) for family in FAMILIES for reader, names, _ in read_by(family) for name in names}
    assert {(reader, name) for reader, name in read if name not in READERS[reader]} == set()
    assert {name for reader, name in read if reader == "integer"} == set(INTEGERS)
    assert {name for reader, name in read if reader != "integer"} == set(NUMBERS)


def test_no_bound_is_larger_than_its_kind_allows():
    assert {name: most for name, most in INTEGERS.items() if most > kind_of(name, LARGEST_INTEGERS)} == {}
    for name, (low, high) in NUMBERS.items():
        least, most = kind_of(name, LARGEST_NUMBERS)
        assert least <= low < high <= most, name


# what is refused ------------------------------------------------------------------------------------------------------


def with_field(fields: dict[str, Any], names: tuple[str, ...], name: str, value: Any) -> dict[str, Any]:
    """Return a configuration whose field has this value under this of its spellings, wherever it may be read from."""
    changed = {key: with_field(each, names, name, value) if key in SCOPES else each for key, each in fields.items()}
    if ("rope_type" in fields and name not in ROTARY) or fields.keys() & {"full_attention", "sliding_attention"}:
        return changed
    return changed | dict.fromkeys(names) | {name: value}


SCOPES = ("text_config", "rope_parameters", "full_attention", "sliding_attention")
ROTARY = {*ROTARY_FIELDS, *VARIANT_FIELDS["llama3"], *VARIANT_FIELDS["yarn"]}


def small_only(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Allocate what the tiny models need, and nothing larger."""

    def allocate(*size: Any, **more: Any) -> torch.Tensor:
        assert math.prod(torch.Size(size[0] if isinstance(size[0], tuple | list) else size)) <= 1 << 16, size
        return empty(*size, **more)

    return allocate


def beyond(reader: str, name: str, length: int = 0) -> list[Any]:
    """Return values just outside of a field's bounds, as lists where the field is one."""
    if reader == "integer":
        return [INTEGERS[name] + 1]
    low, high = NUMBERS[name]
    outside = [low - 1e-9 * max(1.0, abs(low)), high * (1 + 1e-9)]
    return [[each] * length for each in outside] if reader == "numbers" else outside


@pytest.mark.parametrize("family", FAMILIES)
def test_one_more_than_a_bound_is_refused_by_name_before_anything_is_built(family, monkeypatch):
    monkeypatch.setattr(torch, "empty", small_only(torch.empty))
    for reader, names, length in sorted(read_by(family)):
        for name in names:
            for value in beyond(reader, name, length):
                with pytest.raises(ModelError) as error:
                    build(with_field(fields_of(family), names, name, value))
                message = str(error.value)
                assert re.match(rf"config.json: {name} must be an? (integer|number) from .* got ", message), (
                    value,
                    message,
                )
                assert "\n" not in message


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_at_its_bound_is_read_and_one_more_is_not(name):
    assert Config({name: INTEGERS[name]}).integer(name) == INTEGERS[name]
    with pytest.raises(ModelError, match=f"{name} must be an integer from 1 to {INTEGERS[name]}, got"):
        Config({name: INTEGERS[name] + 1}).integer(name)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_at_its_bounds_is_read_and_one_beyond_is_not(name):
    for bound in NUMBERS[name]:
        assert Config({name: bound}).number(name) == bound
    for value in beyond("number", name):
        with pytest.raises(ModelError, match=f"{name} must be a number from"):
            Config({name: value}).number(name)
