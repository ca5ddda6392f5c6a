"""Engines on a GPU: tiny models of every family, and published shapes with few layers. Weights may come from a CPU.

Loading compiles and records, so each model is loaded once; every engine made of it remembers nothing, but works in
memory that earlier ones have used.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from tests.engines import FAMILIES, model_of
from tests.oracle import Tiny
from weft import LLM
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.models import configurations
from weft.models.config import read_config
from weft.runner.runner import Runner

MEMORY_BYTES = 64 << 20
SETTINGS = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640}


def load(config: dict[str, Any], dtype: str, **options: Any) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        llm = LLM(str(file), progress=False, weights="dummy", device="cuda", dtype=dtype, **SETTINGS | options)
    assert type(llm.engine._device) is not Runner, "the kernels for GPUs cannot be used; what was printed says why"
    return llm


@cache
def tiny(family: str, dtype: str) -> LLM:
    """In float32 with the very numbers of the CPU's model, else with numbers of its own."""
    import transformers

    found: Tiny = FAMILIES[family]
    config = getattr(transformers, found.config_class)(**json.loads(json.dumps(found.settings))).to_dict()
    llm = load(config | {"architectures": [found.model_class]}, dtype, memory=MEMORY_BYTES)
    if dtype == "float32":
        copy_weights(model_of(family), llm.engine._device.model)
    return llm


# Weights once more, in the form that a device is fastest with.
AGAIN = (".head", ".stored")


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """In place: recorded steps keep reading the same addresses. A tied head is the embedding itself."""
    given = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith(AGAIN)}
    missing, unexpected = target.load_state_dict(given, strict=False)
    assert all(name.endswith(AGAIN) for name in missing), missing
    assert not unexpected, unexpected


@cache
def published(name: str) -> LLM:
    """A packaged configuration with a few of its layers, in bfloat16: kernels at their real sizes."""
    file = configurations.find(name)
    assert file is not None
    return load(few_layers(read_config(file)), "bfloat16", memory="2GiB")


def few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """As many of the first layers as it takes to have one of every kind; two if all are alike.

    >>> few_layers({"num_hidden_layers": 6, "layer_types": list("aaabab")})
    {'num_hidden_layers': 4, 'layer_types': ['a', 'a', 'a', 'b']}
    """
    name = next((n for n in ("layer_types", "hybrid_override_pattern") if config.get(n)), None)
    if name is None:
        return config | {"num_hidden_layers": 2}
    kinds = config[name]
    count = max(kinds.index(kind) for kind in set(kinds)) + 1
    return config | {"num_hidden_layers": count, name: kinds[:count]}


def make(llm: LLM, memory_bytes: int | None = None, **settings: Any) -> Engine:
    """An engine on the model's device. Freed memory is filled with NaN, and every step is audited."""
    before = llm.engine
    given = {**SETTINGS, "memory_bytes": memory_bytes or before.config.memory_bytes, "paranoid": True, **settings}
    assert given["memory_bytes"] <= before.config.memory_bytes
    return Engine(before.ledger.spec, before._device, EngineConfig(**given))
