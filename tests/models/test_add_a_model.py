"""The exercise of docs/add-a-model.md: its solution is a family that serves its checkpoints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.fences import ROOT
from weft import LLM, SamplingParams
from weft.base.errors import ModelError
from weft.models import bounds
from weft.models.model import sources
from weft.models.registry import FAMILIES

PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
EXERCISE = PAGE.partition("## Exercise")[2]
[CONFIG] = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", EXERCISE, re.DOTALL)]
[SOLUTION] = re.findall(r"```python\n(.*?)```", EXERCISE, re.DOTALL)
BOUNDS = {name: eval(most, vars(bounds)) for name, most in re.findall(r'`"(\w+)": ([A-Z\d]+)`', EXERCISE)}
[LINE] = re.findall(r'`"(\w+)": \("(\w+)", "(\w+)"\)`', EXERCISE)
PROMPT = [5 * number % 509 for number in range(200)]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> type:
    architecture, name, kind = LINE
    module = ModuleType(f"weft.models.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOLUTION, "docs/add-a-model.md", "exec"), vars(module))
    monkeypatch.setitem(FAMILIES, architecture, (name, kind))
    for field, most in BOUNDS.items():
        monkeypatch.setitem(bounds.INTEGERS, field, most)
    return getattr(module, kind)


def checkpoint(family: type, folder: Path) -> Path:
    """Write a checkpoint by the names that the exercise gives to Loom's tensors."""
    generator = torch.Generator().manual_seed(1)
    model = family(CONFIG, torch.float32)
    tensors = {
        source.name.replace(".self_attn.", ".weave."): torch.randn(source.stored_shape, generator=generator) / 8
        for source in sources(model)
    }
    assert any(".weave." in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def load(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", memory="16MiB", progress=False)


def test_the_solution_serves_a_checkpoint_and_a_hit_equals_a_cold_run(family, tmp_path):
    params = SamplingParams(max_tokens=24, temperature=1, seed=1)
    with load(checkpoint(family, tmp_path)) as llm:
        [cold] = llm.generate([PROMPT], params, use_tqdm=False)
        [hit] = llm.generate([PROMPT], params, use_tqdm=False)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 192)
    assert hit.token_ids == cold.token_ids
    assert len(set(cold.token_ids)) > 2, "the model says one thing only"


def test_its_layers_are_those_of_the_exercise(family):
    names = [source.name for source in sources(family(CONFIG, torch.float32))]
    attending = {name.split(".")[2] for name in names if ".q_proj." in name}
    assert attending == {"3"}
    assert len({name for name in names if ".conv." in name}) == 3


def test_a_missing_tensor_is_named(family, tmp_path):
    file = checkpoint(family, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".weave." in name)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(ModelError, match=re.escape(name.replace(".weave.", ".self_attn."))):
        load(tmp_path)


def test_a_configuration_without_its_field_is_refused_by_name(family, tmp_path):
    checkpoint(family, tmp_path)
    fields = {name: value for name, value in CONFIG.items() if name != "attention_every"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="attention_every"):
        load(tmp_path)
