"""Whole models in the exact package: a row's logits and memory have the same bits in every step that computes them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.kernels.gpu_memory import ARENA_BYTES
from tests.support.kernels.operations import PLAIN
from tests.support.models.cuda_engines import few_layers, for_each, free, packaged, release, tested_in_full
from tests.support.models.engines import FAMILIES, TINY, dummy_model
from tests.support.models.exact_steps import EXACT, Sequenced, Steps, drawn, spec_for
from weft.models.model import CausalModel
from weft.models.weights import load_model
from weft.runner.cuda.recorded import StepRecording
from weft.runner.runner import Runner

pytestmark = pytest.mark.gpu

PROMPT, ANSWER = 333, 8
FLOAT16 = ("lfm2", "falcon_h1", "qwen3_next", "gpt_oss")
ODD = (
    "falcon_h1, biases of both mixers, odd heads",
    "qwen3_next, equal heads, width 3, every second layer sparse",
)


def tiny_model(family: str, dtype: torch.dtype) -> CausalModel:
    return dummy_model(TINY[family], dtype, PLAIN).to("cuda")


def published_model(name: str) -> CausalModel:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(few_layers(packaged(name))))
        return load_model(file, torch.bfloat16, "cuda", weights="dummy", progress=False, operations=EXACT)[0]


MODELS = {f"tiny {family} bfloat16": partial(tiny_model, family, torch.bfloat16) for family in (*FAMILIES, *ODD)}
MODELS |= {f"tiny {family} float16": partial(tiny_model, family, torch.float16) for family in FLOAT16}
MODELS |= {name: partial(published_model, name) for name in tested_in_full()}


@pytest.fixture(autouse=True)
def _a_gpu_with_room() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # Tests of the same name hold the model with the usual operations.
    release()
    free()
    yield
    free()


def alone(runner: Runner) -> tuple[Sequenced, list[torch.Tensor]]:
    """A prompt in one piece, then its answer, with nothing beside them."""
    steps = Steps(runner)
    ours = steps.add(drawn(PROMPT + ANSWER, 1))
    steps.run((ours, PROMPT))
    for _ in range(ANSWER):
        steps.run((ours, 1))
    return ours, [unit.clone() for unit in steps.memory(ours)]


def in_company(runner: Runner, decodes: int, recorded: bool = False) -> tuple[Sequenced, list[torch.Tensor]]:
    """The same in chunks of one to three cells, beside other prompts and decodes."""
    steps = Steps(runner, trims=True)
    others = [steps.add(drawn(20, 100 + number)) for number in range(decodes)]
    prompt, ours = steps.add(drawn(320, 2)), steps.add(drawn(PROMPT + ANSWER, 1))
    beside = [(other, 1) for other in others]
    for count in (128, 64, PROMPT - 192):
        steps.run(*beside, (prompt, 64), (ours, count), recorded=recorded)
    for number in range(ANSWER):
        more = [(prompt, 64)] if number % 3 == 2 else []
        steps.run(*beside, (ours, 1), *more, recorded=recorded)
    return ours, steps.memory(ours)


def assert_same(found: tuple[Sequenced, list[torch.Tensor]], wanted: tuple[Sequenced, list[torch.Tensor]]) -> None:
    for position, logits in wanted[0].logits.items():
        assert torch.isfinite(logits).all()
        assert torch.equal(found[0].logits[position], logits), f"logits at {position}"
    for number, (mine, theirs) in enumerate(zip(found[1], wanted[1], strict=True)):
        assert torch.equal(mine, theirs), f"unit {number} of {len(wanted[1])}: pages, then states"


@pytest.mark.parametrize("name", for_each(MODELS))
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(name: str) -> None:
    model = MODELS[name]()
    is_tiny = name.startswith("tiny")
    memory = 256 << 20 if is_tiny else ARENA_BYTES
    runner = Runner(model, spec_for(model), memory, 256, "cuda", operations=EXACT)
    wanted = alone(runner)
    for decodes in (0, 3, 40, 150) if is_tiny else (0, 3, 32):
        assert_same(in_company(runner, decodes), wanted)


@pytest.mark.parametrize("name", for_each(["lfm2-1.2b", "falcon-h1-7b", "qwen3-next-mini"]))
def test_recorded_steps_have_the_bits_of_eager_ones(name: str) -> None:
    model = MODELS[name]()
    runner = Runner(model, spec_for(model), ARENA_BYTES, 48, "cuda", operations=EXACT, recording=StepRecording(1024))
    wanted = alone(runner)
    for decodes in (0, 5, 32):
        assert_same(in_company(runner, decodes, recorded=True), wanted)
