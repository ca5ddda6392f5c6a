"""A backend is operations, an executor and a transport: the plain package runs everywhere through one assembly."""

from dataclasses import replace

import pytest
import torch

from tests.support.models.engines import Ask, dummy_model, greedy, seeded, serve, tokens
from tests.support.runner.cuda_runner import FEW_LAYERS, SHORT_CELL, cpu_engine
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.choosing import chosen_everywhere
from weft.kernels.plain.together import record_decodes
from weft.memory.spec import MemorySpec
from weft.runner.passes import ModelPass
from weft.start.assembling import assemble_runner, numerics_of

PLAIN = chosen_everywhere("plain", "a test asks for it")
ASKS = [Ask(tokens(19, seed=1), greedy(6)), Ask(tokens(3, seed=3), seeded(5, 7), step=1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_the_plain_package_runs_on_every_device_through_the_same_assembly(family: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = dummy_model(FEW_LAYERS[family], operations=PLAIN.operations)
    wanted = [answer.tokens for answer in serve(cpu_engine(model), ASKS)]
    model = model.to(device)
    spec = MemorySpec(model.memories(PLAIN.operations), SHORT_CELL)
    config = EngineConfig(
        memory_bytes=8 << 20, max_sequences=4, max_tokens_per_step=64, max_length=256, paranoid=True, depth=1
    )
    runner = assemble_runner(model, spec, config, PLAIN, device, ModelPass())
    assert runner.recorded is None
    assert [answer.tokens for answer in serve(Engine(spec, runner, config), ASKS)] == wanted


def test_a_backend_says_whether_its_steps_are_recorded_and_in_which_passes_they_are_computed() -> None:
    assert not PLAIN.are_recorded
    assert chosen_everywhere("cuda", "a test asks for it").are_recorded
    kinds = {name: type(numerics_of(replace(PLAIN, numerics=name))).__name__ for name in ("usual", "cells", "turns")}
    assert kinds == {"usual": "UsualNumerics", "cells": "ExactCells", "turns": "ExactTurns"}
    assert PLAIN.operations.record_decodes is record_decodes
