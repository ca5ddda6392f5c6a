"""Engines on a GPU: tiny models of every family, and published shapes with few layers. Weights may come from a CPU.

Loading compiles and records, so each model is loaded once and held until another one is asked for; every engine made
of it remembers nothing, but works in memory that earlier ones have used. Tests of one model are a group (`for_each`),
which few processes share.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.kernels.gpu_memory import ARENA_BYTES, GROUP
from tests.support.kernels.operations import PLAIN
from tests.support.models.engines import TINY, model_of
from tests.support.models.oracle import config_of
from weft import LLM
from weft.base.config import EngineConfig
from weft.base.options import memory_bytes as bytes_of
from weft.drafting.policy.choosing import Drafting
from weft.engine.loop import Engine
from weft.models import configurations
from weft.models.config import read_config

MEMORY_BYTES = 64 << 20
SETTINGS = {"max_sequences": 8, "max_tokens_per_step": 512, "max_length": 640}
# Nothing that these settings allow is long enough for FlashInfer, which compiles for a minute for each kind of layer.
LONGEST_WORK = SETTINGS["max_tokens_per_step"] * SETTINGS["max_length"]


_held: dict[str, LLM] = {}


def held(group: str, make: Callable[[], LLM]) -> LLM:
    """The model of a group of tests, made if it is not the one that the process holds."""
    if group not in _held:
        release()
        _held[group] = make()
    return _held[group]


def release(keep: str | None = None) -> None:
    """Give the memory of all models back, but for that of the group `keep`, and that of a failed test."""
    others = _held.keys() - {keep}
    for group in others:
        _held.pop(group).close()
    if others or hasattr(sys, "last_value"):
        free()


def free() -> None:
    """Give back what nothing uses. The frames of a failed test hold its tensors; modules refer to each other."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()
    torch.cuda.empty_cache()


def for_each(names: Iterable[str], group: str = "{}") -> list[Any]:
    """Parameters of a test, each in the group of its model. They come first in a test's id."""
    return [pytest.param(name, id=group.format(name) + GROUP) for name in names]


def load(config: dict[str, Any], dtype: str, memory: int, is_compiled_ahead: bool = False, **options: Any) -> LLM:
    """An arena of `memory` bytes: what is free belongs to the tests of other processes, too.

    Kernels are compiled where they are first launched: other processes are busy with theirs.
    """
    assert bytes_of(memory) is not None, 'a test must state its memory: "auto" would take all that others need'
    # Drafters of their own would take memory, and `make` would leave them out.
    options = {"draft": "off"} | options | {"memory": memory}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        ahead = nullcontext() if is_compiled_ahead else mock.patch("weft.start.loading.compile_once")
        with ahead, mock.patch("weft.kernels.cuda.attention.flashinfer.warm"):
            llm = LLM(str(file), progress=False, weights="dummy", device="cuda", dtype=dtype, **SETTINGS | options)
    assert llm.engine._device.recorded is not None, "the kernels for GPUs cannot be used; what was printed says why"
    return llm


def tiny(family: str, dtype: str) -> LLM:
    """In float32 with the very numbers of the CPU's model, else with numbers of its own."""
    return held(f"tiny {family} {dtype}", lambda: load_tiny(family, dtype))


def load_tiny(family: str, dtype: str, memory: int = MEMORY_BYTES, **options: Any) -> LLM:
    llm = load(config_of(TINY[family]), dtype, memory, **options)
    if dtype == "float32":
        copy_weights(model_of(family, operations=PLAIN), llm.engine._device.model)
    return llm


# Weights once more, in the form that a device is fastest with.
AGAIN = (".head",)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """In place: recorded steps keep reading the same addresses. A tied head is the embedding itself."""
    given = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith(AGAIN)}
    missing, unexpected = target.load_state_dict(given, strict=False)
    assert all(name.endswith(AGAIN) for name in missing), missing
    assert not unexpected, unexpected


def published(name: str) -> LLM:
    """A packaged configuration with a few of its layers, in bfloat16: kernels at their real sizes."""
    return held(name, lambda: load(few_layers(packaged(name)), "bfloat16", ARENA_BYTES))


# Of packaged configurations those whose kernels no other one has are tested in their own sizes.
DENSE = {
    "gemma-2-9b", "mistral-small-3.1-24b", "olmo-2-7b", "olmo-3-7b", "phi-4", "qwen2.5-7b", "smollm3-3b",
}  # fmt: skip


def tested_in_full() -> list[str]:
    return [name for name in configurations.names() if name not in DENSE]


def packaged(name: str) -> dict[str, Any]:
    file = configurations.find(name)
    assert file is not None
    return read_config(file)


def few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """As many of the first layers as it takes to have one of every kind; two if all are alike.

    >>> few_layers({"num_hidden_layers": 6, "layer_types": list("aaabab")})
    {'num_hidden_layers': 4, 'layer_types': ['a', 'a', 'a', 'b']}
    """
    if "linear_attn_config" in config:
        return few_kimi_layers(config)
    name = next((n for n in ("layer_types", "hybrid_override_pattern") if config.get(n)), None)
    if name is None:
        return config | {"num_hidden_layers": 2}
    kinds = config[name]
    count = max(kinds.index(kind) for kind in set(kinds)) + 1
    return config | {"num_hidden_layers": count, name: kinds[:count]}


def few_kimi_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Kimi-Linear lists the numbers of the layers of each kind, from one on."""
    listed = config["linear_attn_config"]
    count = min(listed["full_attn_layers"])
    few = {name: [n for n in listed[name] if n <= count] for name in ("full_attn_layers", "kda_layers")}
    return config | {"num_hidden_layers": count, "linear_attn_config": listed | few}


def make(llm: LLM, memory_bytes: int | None = None, drafting: Drafting | None = None, **settings: Any) -> Engine:
    """An engine on the model's device. Freed memory is filled with NaN, and every step is audited."""
    before = llm.engine
    given = {**SETTINGS, "memory_bytes": memory_bytes or before.config.memory_bytes, "paranoid": True, **settings}
    assert given["memory_bytes"] <= before.config.memory_bytes
    return Engine(before.ledger.spec, before._device, EngineConfig(**given), drafting=drafting)
