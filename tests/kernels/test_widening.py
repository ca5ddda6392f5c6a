"""On a CPU without 16-bit units no operator multiplies bfloat16: PyTorch would do it one number at a time."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models.engines import FAMILIES, TINY, Ask, dummy_model, greedy, serve, tokens
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.choosing import everywhere
from weft.kernels.cpu import linear, moe
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

MULTIPLYING = ("mm", "mv", "dot", "linear", "scaled_dot_product", "convolution")


class Multiplied(TorchDispatchMode):
    """Notes operators that multiply matrices of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        name = operator.name().removeprefix("aten::")
        narrow = any(isinstance(part, torch.Tensor) and part.dtype == torch.bfloat16 for part in arguments)
        if narrow and any(word in name for word in MULTIPLYING):
            self.found.add(name)
        return operator(*arguments, **(named or {}))


def multiplied(family: str) -> set[str]:
    """Serve a chunked prompt, one that shares its beginning, and decodes of one and of several rows."""
    operations = everywhere("cpu")
    model = dummy_model(TINY[family], torch.bfloat16, operations)
    spec, memory = MemorySpec(model.memories(operations)), 64 << 20
    config = EngineConfig(memory_bytes=memory, max_sequences=8, max_tokens_per_step=96, max_length=640)
    runner = Runner(model, spec, memory, config.max_sequences, threads=1, operations=operations)
    engine, common = Engine(spec, runner, config), tokens(150, 1)
    with Multiplied() as seen:
        serve(engine, [Ask(common, greedy(3))])
        serve(engine, [Ask(common + tokens(20 + n, n), greedy(4)) for n in range(6)])
    return seen.found


@pytest.mark.parametrize("family", FAMILIES)
def test_without_16_bit_units_nothing_multiplies_bfloat16(family, monkeypatch):
    monkeypatch.setattr(linear, "HAS_BFLOAT16", False)
    assert multiplied(family) == set()


def test_with_them_something_does(monkeypatch):
    """So the search can find it."""
    monkeypatch.setattr(linear, "HAS_BFLOAT16", True)
    monkeypatch.setattr(linear, "prepare", lambda weight, twice: weight)
    monkeypatch.setattr(moe, "prepare_experts", lambda layer, twice: layer)
    assert any("scaled_dot_product" in name for name in multiplied("llama"))
