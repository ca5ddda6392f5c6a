"""Configurations from outside: every field of every family with values that make no sense.

Either the model loads and computes, or one line says which field must be what. Nothing is allocated or built on the way
that such a value asks for.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.kernels.operations import CPU
from tests.support.models.config_fields import fields_of
from tests.support.models.engines import FAMILIES
from weft import models
from weft.base.config import EngineConfig
from weft.base.errors import ModelError
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.spec import MemorySpec
from weft.models import configurations
from weft.models.bounds import INTEGERS, NUMBERS
from weft.models.config import Config, read_config, shown
from weft.models.model import CausalModel
from weft.models.weights import load_model
from weft.runner.runner import Runner

MEMORY_BYTES = 8 << 20
NESTED = json.loads("[" * 400 + "]" * 400)
ABSURD: list[Any] = [
    10**9,
    10**12,
    2**63,
    10**40,
    -1,
    0,
    1.5,
    -0.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "",
    "x" * 100_000,
    "1",
    [],
    [None] * 3,
    [[], {}],
    ["x"] * 100_000,
    {},
    {"rope_type": []},
    {"rope_type": "yarn", "factor": 0},
    NESTED,
    None,
]


def changed(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if not path:
        return value
    return fields | {path[0]: changed(fields.get(path[0], {}), path[1:], value)}


def paths_of(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inner) for inner in paths_of(value))


def load(folder: Path, config: Any) -> CausalModel:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder / "config.json", torch.float32, weights="dummy", progress=False)[0]


def answer(model: CausalModel) -> int:
    """How many tokens come of a short prompt."""
    spec = MemorySpec(model.memories(CPU))
    config = EngineConfig(memory_bytes=MEMORY_BYTES, max_sequences=2, max_length=256)
    engine = Engine(spec, Runner(model, spec, MEMORY_BYTES, 2, threads=1), config)
    engine.add(Request(np.array([0] * 70, np.int32), SamplingParams(max_tokens=2, temperature=0.0)))
    found = 0
    while not engine.idle:
        found += sum(output.token is not None for output in engine.step())
    return found


def try_one(folder: Path, config: Any) -> None:
    """It loads and computes, or one line refuses it."""
    try:
        model = load(folder, config)
    except ModelError as error:
        message = str(error)
        assert "\n" not in message
        assert 0 < len(message) < 1200
    else:
        assert answer(model) == 2


@pytest.fixture
def modest(monkeypatch):
    """No tensor of more than 64 MiB may be asked for: a hostile size must be refused before that."""
    original = torch.empty

    def empty(*size: Any, **more: Any) -> torch.Tensor:
        flat = size[0] if size and isinstance(size[0], tuple | list | torch.Size) else size
        assert math.prod(flat) <= 1 << 24, f"allocates {flat}"
        return original(*size, **more)

    monkeypatch.setattr(torch, "empty", empty)


def check(folder: Path, family: str, cases: list[tuple[tuple[str, ...], Any]]) -> None:
    fields = fields_of(family)
    for path, value in cases:
        try:
            try_one(folder, changed(fields, path, value))
        except Exception as error:
            pytest.fail(f"{family}: {'.'.join(path)} = {shown(value)}: {type(error).__name__}: {error}"[:1500])


def cases_of(family: str) -> list[tuple[tuple[str, ...], Any]]:
    """Every field that any family reads; the others stay in the file unseen."""
    sources = " ".join(path.read_text() for path in Path(models.__file__).parent.rglob("*.py"))
    names = set(re.findall(r'"(\w+)"', sources))
    return [(path, value) for path in paths_of(fields_of(family)) if path[-1] in names for value in ABSURD]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_makes_no_sense_is_one_line(tmp_path, modest, family):
    """Every field once with a number that is far too large, and a few of the rest."""
    cases = cases_of(family)
    check(tmp_path, family, [case for case in cases if case[1] == 10**12])
    check(tmp_path, family, random.Random(family).sample(cases, 15))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_makes_no_sense_is_one_line(tmp_path, modest, family):
    check(tmp_path, family, cases_of(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 10**9), ("vocab_size", 10**12), ("hidden_size", -1)]
)
def test_a_size_out_of_bounds_is_named_with_its_bound(tmp_path, modest, family, field, value):
    if FAMILIES[family].config_class == "NemotronHConfig" and field == "num_hidden_layers":
        pytest.skip("its blocks are listed one by one")
    fields = fields_of(family)
    path = ("text_config", field) if "text_config" in fields else (field,)
    with pytest.raises(ModelError) as error:
        load(tmp_path, changed(fields, path, value))
    assert str(error.value) == f"config.json: {field} must be an integer from 1 to {INTEGERS[field]}, got {value}"


def test_weights_that_no_machine_holds_are_refused_before_they_are_made(tmp_path):
    """Every field is within its bounds; all of them together are not."""
    fields = fields_of("llama") | {"vocab_size": 1 << 22, "hidden_size": 1 << 17}
    with pytest.raises(ModelError, match="memory"):
        load(tmp_path, fields)


def test_published_values_are_far_from_every_bound():
    for packaged in Path(configurations.__file__).parent.glob("*.json"):
        fields = json.loads(packaged.read_text())
        for name, value in (fields | fields.get("text_config", {})).items():
            if name in INTEGERS and isinstance(value, int):
                assert 2 * value <= INTEGERS[name], f"{packaged.name}: {name}"
            if name in NUMBERS and isinstance(value, int | float):
                assert NUMBERS[name][0] <= value <= NUMBERS[name][1], f"{packaged.name}: {name}"


def test_a_field_without_a_bound_cannot_be_read():
    with pytest.raises(KeyError):
        Config({"some_size": 5}).integer("some_size")
    with pytest.raises(KeyError):
        Config({"some_factor": 5}).number("some_factor")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "nul", '"' + "x" * (5 << 20) + '"', "[1]", "\xff"])
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError) as error:
        read_config(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def test_values_are_shown_in_a_few_characters():
    for value in ABSURD:
        assert len(shown(value)) <= 80
