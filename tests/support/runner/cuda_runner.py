"""Engines on the runner of a GPU, interpreted on a CPU, and on the reference."""

from __future__ import annotations

from tests.support.kernels.operations import CPU, GPU_ROWS
from tests.support.models.engines import TINY
from weft.base.config import EngineConfig
from weft.device.store import Store
from weft.drafting.policy.choosing import Drafting
from weft.engine.loop import Engine
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.models.model import CausalModel
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.cuda.recorded import StepRecording
from weft.runner.runner import Runner

MEMORIES = (
    AttentionMemory(1, 8, "float32"),
    AttentionMemory(1, 8, "float32", window=10),
    short_conv_memory(4, 3, "float32"),
)
SPEC = MemorySpec(MEMORIES, cell=8)


def prompt_inputs(size: Size) -> StepInputs:
    return StepInputs(size, 9, 10, SPEC, Store(SPEC, 1 << 16, scratch=True).scratch, "cpu", GPU_ROWS)


# The interpreter takes its time for every token and layer: cells are short, and there is one layer of each kind.
SHORT_CELL = 16
FEW_LAYERS = {
    "lfm2": TINY["lfm2"].variant(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "qwen3_5": TINY["qwen3_5"].variant(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    ),
    "gemma3": TINY["gemma3"].variant(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "falcon_h1": TINY["falcon_h1, state of 24"].variant(num_hidden_layers=1),
}


def cuda_engine(
    model: CausalModel, operations: Operations = GPU_ROWS, drafting: Drafting | None = None, **settings
) -> Engine:
    room = 0 if drafting is None else drafting.most
    memory, spec = 8 << 20, MemorySpec(model.memories(operations), SHORT_CELL, room)
    options = {"max_sequences": 4, "max_tokens_per_step": 200, "max_length": 256, "paranoid": True, "depth": 1}
    config = EngineConfig(memory_bytes=memory, **(options | settings))
    runner = Runner(
        model, spec, memory, config.max_sequences, operations=operations, recording=StepRecording(config.max_length)
    )
    return Engine(spec, runner, config, drafting=drafting)


def cpu_engine(model: CausalModel) -> Engine:
    memory, spec = 8 << 20, MemorySpec(model.memories(CPU), SHORT_CELL)
    config = EngineConfig(memory_bytes=memory, max_sequences=4, max_tokens_per_step=200, max_length=256, cache=False)
    return Engine(spec, Runner(model, spec, memory, 4, threads=1), config)
