"""The page about operations: its example runs, and its tables and paths are true."""

from __future__ import annotations

import re

import torch

from tests.support.fences import ROOT
from tests.support.models.engines import Ask, greedy, model_of, serve, tokens
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.choosing import GROUPS
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

PAGE = (ROOT / "docs" / "operations-interface.md").read_text()


def test_the_example_runs_a_model():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(code, "docs/operations-interface.md", "exec"), names)
    operations = names["operations"]
    model = model_of("olmo_hybrid", operations=operations)
    spec, memory = MemorySpec(model.memories(operations)), 8 << 20
    config = EngineConfig(memory_bytes=memory, max_sequences=1, max_tokens_per_step=16, max_length=64)
    runner = Runner(model, spec, memory, 1, threads=1, operations=operations)
    [answer] = serve(Engine(spec, runner, config), [Ask(tokens(9, seed=1), greedy(3))])
    assert len(answer.tokens) == 3
    # Norms over all heads of queries and keys are operations of their own, in a prompt and in two decodes.
    assert {shape[0] for shape in names["counted"]} == {9, 1}
    assert all(isinstance(shape, torch.Size) for shape in names["counted"])


def test_paths_and_groups_that_the_page_names_exist():
    for path in re.findall(r"`((?:weft/|kernels/|tests/|models/|docs/)[\w/.]+)`", PAGE):
        place = path if path.startswith(("weft/", "tests/", "docs/")) else f"weft/{path}"
        assert (ROOT / place).exists(), path
    for name in ("ssd_memory", "gated_delta_memory", "run_together", "side_by_side", "prepare"):
        assert any(name in names for names in GROUPS.values())
