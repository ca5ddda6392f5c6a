"""MTP heads and draft models with the runner and the kernels of a GPU: interpreted on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.engines import Ask, greedy, seeded, serve, tokens
from tests.operations import GPU_ROWS, PLAIN
from tests.test_cuda_runner import SHORT_CELL
from tests.test_mtp import ROOM, Drafts, Recording, checkpoint
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models.weights import load_head, load_model
from weft.runner.cuda import recorded
from weft.runner.cuda.drafters import CudaHead
from weft.runner.cuda.recorded import RecordedSteps, step_sizes
from weft.runner.cuda.runner import CudaRunner
from weft.runner.hidden_states import HiddenStates, KeepsStates
from weft.speculate.costs import FreeDrafts

MEMORY = 8 << 20
SEATS = 2


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256])
def test_what_a_drafter_reads_after_a_verification_has_a_recorded_size(most: int) -> None:
    sizes = step_sizes(most, room=7, drafter=True)
    for rows in range(1, most + 1):
        assert any(size.holds(0, rows, 4 * rows, rows) for size in sizes)
        assert any(size.holds(rows // 2, rows - rows // 2, 4 * (rows - rows // 2), rows) for size in sizes)
    assert all(size.answers == size.rows - 1 for size in sizes), "a drafter samples once in a row"


def interpreted_engine(family: str, **settings: object) -> Engine:
    """An engine of the runners of a GPU, whose kernels are interpreted."""
    folder = checkpoint(family).folder
    model, _ = load_model(folder, torch.float32, progress=False, operations=PLAIN)
    head = load_head(folder, model, torch.float32, "checkpoint", 0, PLAIN)
    options = {"max_sequences": SEATS, "max_tokens_per_step": 64, "max_length": 128, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=MEMORY, **options)
    spec, own = (MemorySpec(each.memories(GPU_ROWS), SHORT_CELL, ROOM) for each in (model, head))
    hidden = HiddenStates(SEATS, 128, head.width, torch.float32)
    runner = CudaRunner(model, spec, MEMORY, SEATS, 128, "cpu", operations=GPU_ROWS, use=KeepsStates(hidden))
    executor = CudaHead(hidden, head, own, MEMORY, SEATS, 128, "cpu", operations=GPU_ROWS)
    ledger = Ledger(own, MEMORY, SEATS, 128, remember_freed=True)
    drafter = Recording(hidden, ledger, executor, 256, 64, True)
    drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=drafter.name)
    return Engine(spec, runner, config, drafting=drafting, draft_model=drafter)


def test_recorded_steps_of_a_head_draft_as_a_plain_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (32,))
    monkeypatch.setattr(recorded, "DRAFTING", (2,))
    monkeypatch.setattr(recorded, "DRAFT_WIDTHS", (4,))
    replayed, run = [], RecordedSteps.run

    def counted(self, plan):
        output = run(self, plan)
        if self.drafter and output is not None:
            replayed.append(len(plan.tokens) > plan.rows)
        return output

    monkeypatch.setattr(RecordedSteps, "run", counted)
    family = "qwen3_5, two layers"
    asks = [Ask(tokens(18, 1), greedy(8)), Ask(tokens(4, 2), greedy(5), step=1)]
    engine = interpreted_engine(family, depth=1)
    model = engine.planner.drafts.model
    known = {}
    for ask in asks:
        logits = checkpoint(family).oracle
        answer: list[int] = []
        for _ in range(ask.params.max_tokens):
            answer.append(int(logits.logits(ask.prompt + answer)[-1].argmax()))
        known[tuple(ask.prompt)] = answer
    model.answers = known
    found = serve(engine, asks)
    assert [answer.tokens for answer in found] == list(known.values())
    assert model.seen
    for text, drafts in model.seen:
        assert drafts == checkpoint(family).drafts(text, len(drafts)), f"after {len(text)} tokens"
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 0
    assert {True, False} == set(replayed), "decodes, and what was accepted"
