"""Engines with host memory and a file below them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from tests.support.hashed.chained import ChainedDevice, layout_of
from tests.support.models.engines import model_of, smallest_memory, spec_of
from tests.support.tiers.disk_blocks import IDENTITY, FlakyBlocks
from tests.support.tiers.host_memory import two_prompts
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.memory.misses import Miss, Reason
from weft.runner.runner import Runner


def chained_engine(family: str, path: Path, **settings: object) -> Engine:
    """An engine on a tiny model whose device memory holds one sequence, host memory two, and a file many."""
    spec, memory = spec_of(family), smallest_memory(family, 420, 4)
    options = {"max_sequences": 4, "max_tokens_per_step": 512, "max_length": 420, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory, host_bytes=2 * memory, disk_bytes=16 << 20, **options)
    runner = Runner(model_of(family), spec, memory, config.max_sequences, threads=1)
    runner.tiers.add_host_memory(config.host_bytes)
    runner.tiers.add_disk(path, config.disk_bytes, IDENTITY)
    return Engine(spec, runner, config, closing_seconds=300.0)


def chain_of_two() -> tuple[Engine, ChainedDevice, list[list[int]]]:
    workload = two_prompts()
    workload = replace(workload, config=replace(workload.config, disk_bytes=1))
    layout = layout_of(workload, 1 << 20)
    device = ChainedDevice(workload, FlakyBlocks(layout.size_bytes), layout, Random("chain"))
    device.patience = 1.0
    return (
        Engine(workload.spec, device, workload.config, closing_seconds=300.0),
        device,
        [a.prompt for a in workload.arrivals],
    )


def save_all(engine: Engine) -> None:
    engine.write_behind()
    while not engine.idle:
        while not engine.idle:
            engine.step()
        engine.write_behind()


def missing(reusable: int) -> Miss:
    return Miss(Reason.NEVER_COMPUTED, 0, 0, reusable, reusable)
