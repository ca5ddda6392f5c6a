"""MTP heads and draft models with the runner and the kernels of a GPU: interpreted on a CPU, and on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.drafting.mtp import FAMILIES, ROOM, Drafts, Recording, check_drafts, check_hits
from tests.support.kernels.gpu_memory import ARENA_BYTES, GROUP
from tests.support.kernels.operations import GPU_ROWS, PLAIN
from tests.support.kernels.plans import Row, make_plan
from tests.support.models.cuda_engines import (
    MEMORY_BYTES,
    SETTINGS,
    few_layers,
    for_each,
    held,
    load,
    packaged,
    release,
)
from tests.support.models.draft_fuzz import WatchedEngine, answer_all, compare, wishes
from tests.support.models.engines import FAMILIES as ALL_TINY
from tests.support.models.engines import Ask, greedy, seeded, serve, smallest_memory, tokens
from tests.support.models.mtp_oracle import checkpoint
from tests.support.models.oracle import Oracle
from tests.support.runner.cuda_runner import SHORT_CELL
from weft import LLM
from weft.base.completion import complete
from weft.base.config import EngineConfig
from weft.base.plan import Plan, StepDrafts
from weft.drafting import head as draft_head
from weft.drafting.head import DraftHead
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.state_lines import StateLines
from weft.engine.loop import Engine
from weft.kernels.interface import Operations
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.models import mtp
from weft.models.weights import load_head, load_model
from weft.runner.cuda import recorded
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.cuda.recorded import RecordedSteps, StepRecording, moved_decodes, step_sizes
from weft.runner.eager import EagerSteps
from weft.runner.hidden_states import DraftBoard, HiddenStates
from weft.runner.passes import HeadPass, KeepingPass
from weft.runner.runner import Flight, Runner

MEMORY = 8 << 20
SEATS = 2


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256])
def test_what_a_drafter_reads_after_a_verification_has_a_recorded_size(most: int) -> None:
    sizes = step_sizes(most, room=7, drafter=True)
    for rows in range(1, most + 1):
        assert any(size.holds(0, rows, 4 * rows, rows) for size in sizes)
        assert any(size.holds(rows // 2, rows - rows // 2, 4 * (rows - rows // 2), rows) for size in sizes)
    assert all(size.answers == size.rows - 1 for size in sizes), "a drafter samples once in a row"


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_head_are_placed_as_the_definition_says(seed: int) -> None:
    """The inputs of recorded steps, and what the device makes of them, against the plan that the definition returns."""
    random, cell, seats = Random(seed), 8, 5
    spec = MemorySpec((AttentionMemory(1, 4, "float32"),), cell=cell, draft_room=3)
    where = (8, spec, {Kind.PAGE: 99}, "cpu", PLAIN, 0)
    board = DraftBoard(seats, "cpu")
    board.tokens.copy_(torch.randint(0, 1000, board.tokens.shape, generator=torch.Generator().manual_seed(seed)))
    rows, drafts = random.sample(range(seats), 3), [random.randint(1, 3) for _ in range(3)]
    board.refused[rows] = torch.tensor([random.randint(0, count) for count in drafts], dtype=torch.int32)
    refused, guesses = board.refused.numpy()[rows], board.tokens.numpy()[rows]
    starts = [random.randint(0, 3 * cell) for _ in rows]
    pages = [random.sample(range(90), 8) for _ in rows]
    facts = list(zip(rows, starts, drafts, pages, strict=True))
    none, ahead = np.zeros(3, np.int32), np.array(drafts, np.int32)

    # What the model chose, and the sample after the last right draft.
    plan = make_plan([Row(s, s + k + 1, seat=seat, pages=each, tokens=[0] * (k + 1)) for seat, s, k, each in facts])
    plan = replace(plan, drafts=StepDrafts(unverified_inside=ahead, on_device=ahead + 1))
    wanted = complete(plan, refused, cell, guesses)
    inputs = StepInputs(Size(0, 4, 16), seats, *where)
    inputs.fill(plan, np.arange(len(plan.tokens), dtype=np.int32))
    step, ids = inputs.step, inputs.step.batch.token_ids.clone()
    board.read(ids, step.on_device)
    answer = (step.answer - step.ends_earlier * board.refused[step.answer_seat])[:3].tolist()
    firsts = step.batch.first[:3].tolist()
    for row, (first, last, length) in enumerate(zip(firsts, answer, wanted.end - wanted.start, strict=True)):
        before = int((wanted.end - wanted.start)[:row].sum())
        assert last - first + 1 == length
        assert ids[first : last + 1].tolist() == wanted.tokens[before : before + length].tolist()

    # The guesses after it.
    after = [Row(s + k + 1, s + k + 2, seat=seat, pages=each, from_board=1) for seat, s, k, each in facts]
    plan = replace(make_plan(after), drafts=StepDrafts(unverified_before=ahead, earlier_slot=none))
    wanted = complete(plan, refused, cell)
    decodes = DecodeInputs(seats, *where)
    decodes.fill(plan, 4, np.zeros(3, np.int32))
    seat = decodes.tensor("seat", 4)
    batch = moved_decodes(decodes.batch(4, seat), decodes.tensor("starts_earlier", 4) * board.refused[seat])
    assert batch.start.tolist() == batch.positions.tolist() == [*wanted.start.tolist(), 0]
    assert batch.full.write_page.tolist() == [*(pages[row][p // cell] for row, p in enumerate(wanted.start)), 99]


def interpreted_engine(family: str, operations: Operations = GPU_ROWS, **settings: object) -> Engine:
    """An engine of the runners of a GPU. Its kernels are interpreted, unless other operations are given."""
    folder = checkpoint(family).folder
    model, _ = load_model(folder, torch.float32, progress=False, operations=PLAIN)
    head = load_head(folder, model, torch.float32, "checkpoint", 0, PLAIN)
    options = {"max_sequences": SEATS, "max_tokens_per_step": 64, "max_length": 128, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=MEMORY, **options)
    spec, own = (MemorySpec(each.memories(GPU_ROWS), SHORT_CELL, ROOM) for each in (model, head))
    hidden = HiddenStates(StateLines(SEATS, 128), head.width, torch.float32)
    more = {"operations": operations, "recording": StepRecording(128)}
    runner = Runner(model, spec, MEMORY, SEATS, computes=KeepingPass(hidden), **more)
    executor = Runner(head, own, MEMORY, SEATS, computes=HeadPass(hidden), **more)
    ledger = Ledger(own, MEMORY, SEATS, 128, remember_freed=True)
    drafter = Recording(hidden.rows, ledger, executor, 256, 64, True, frequent_tokens=head.frequent)
    drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=drafter.name)
    return Engine(spec, runner, config, drafting=drafting, draft_model=drafter)


@pytest.mark.kernels
def test_recorded_steps_of_a_head_draft_as_a_plain_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (32,))
    monkeypatch.setattr(recorded, "DRAFTING", (2,))
    monkeypatch.setattr(recorded, "DRAFT_WIDTHS", (4,))
    monkeypatch.setattr(mtp.MtpHead, "limit", 100)
    monkeypatch.setattr(draft_head, "RARE_MEMORY", 1)
    monkeypatch.setattr(draft_head, "RARE_SHARE", 0.5)
    replayed, run = [], RecordedSteps.run

    def counted(self, plan, *more):
        output = run(self, plan)
        if self.computes.is_drafter and output is not None:
            replayed.append(len(plan.tokens) > plan.rows)
        return output

    monkeypatch.setattr(RecordedSteps, "run", counted)
    # The interpreter takes its time for every layer.
    family = "qwen3_5, one layer"
    asks = [Ask(tokens(11, 1), greedy(9)), Ask(tokens(3, 2), greedy(7), step=1)]
    engine = interpreted_engine(family, depth=1)
    model = engine.planner.drafts.model
    model.answers = {tuple(ask.prompt): greedy_answer(family, ask) for ask in asks}
    found = serve(engine, asks)
    assert [answer.tokens for answer in found] == list(model.answers.values())
    assert model.seen
    for text, drafts, among in model.seen:
        assert drafts == checkpoint(family).drafts(text, len(drafts), among), f"after {len(text)} tokens"
    assert 100 in {among for _, _, among in model.seen}
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 0
    assert {True, False} == set(replayed), "decodes, and what was accepted"
    assert model.followed > 2


def check_guesses_beside_prompts(patch: pytest.MonkeyPatch) -> None:
    """No step is recorded, and rows beside prompts have guesses that only the device knows."""
    patch.setattr(RecordedSteps, "replay", lambda self, plan: None)
    eager, run = [], Runner.run

    def counted(self, plan, *more):
        eager.append(len(plan.drafts.on_device) > 0 and bool((plan.end - plan.start > 1 + plan.drafts.counts).any()))
        return run(self, plan, *more)

    patch.setattr(Runner, "run", counted)
    family = "qwen3_5, one layer"
    asks = [Ask(tokens(11, 1), greedy(16)), *(Ask(tokens(40, n), greedy(1), step=4 * n) for n in (1, 2))]
    engine = interpreted_engine(family, PLAIN, depth=1)
    engine.planner.device_builds_on_flight = None
    model = engine.planner.drafts.model
    model.answers = {tuple(ask.prompt): greedy_answer(family, ask) for ask in asks}
    assert [answer.tokens for answer in serve(engine, asks)] == list(model.answers.values())
    for text, drafts, among in model.seen:
        assert drafts == checkpoint(family).drafts(text, len(drafts), among), f"after {len(text)} tokens"
    assert any(eager)


@pytest.mark.kernels
def test_guesses_stay_on_the_device_beside_prompts_that_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    check_guesses_beside_prompts(monkeypatch)
    with monkeypatch.context() as planted:
        planted.setattr(EagerSteps, "read_drafts", lambda self, *args: None)
        with pytest.raises(AssertionError):
            check_guesses_beside_prompts(planted)


def greedy_answer(family: str, ask: Ask) -> list[int]:
    answer: list[int] = []
    for _ in range(ask.params.max_tokens):
        answer.append(int(checkpoint(family).oracle.logits(ask.prompt + answer)[-1].argmax()))
    return answer


# on a GPU -------------------------------------------------------------------------------------------------------------


def open_gpu(folder: Path, draft: str) -> LLM:
    """A tiny checkpoint in float32, with its drafter. Kernels are compiled where they are first launched."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with mock.patch("weft.start.loading.compile_once"), mock.patch("weft.kernels.cuda.attention.flashinfer.warm"):
        llm = LLM(
            str(folder),
            progress=False,
            device="cuda",
            dtype="float32",
            memory=MEMORY_BYTES,
            draft=draft,
            **SETTINGS,
        )
    assert llm.engine._device.recorded is not None, "the kernels for GPUs cannot be used; what was printed says why"
    return llm


def gpu_llm(family: str) -> LLM:
    return held(f"tiny {family} float32 mtp", lambda: open_gpu(checkpoint(family).folder, "mtp"))


def config_on_gpu(llm: LLM, memory: int | None = None, **settings: object) -> EngineConfig:
    options = {**SETTINGS, "memory_bytes": memory or llm.engine.config.memory_bytes, "paranoid": True, **settings}
    return EngineConfig(**options)


def plain_engine(llm: LLM, **settings: object) -> Engine:
    return Engine(llm.engine.ledger.spec, llm.engine._device, config_on_gpu(llm, **settings))


def fresh_ledger(llm: LLM, memory: int | None = None) -> Ledger:
    """Nothing of earlier engines is in the memory of the drafter."""
    before, size = llm.engine.planner.drafts.model, memory or llm.engine.config.draft_bytes
    return Ledger(before.ledger.spec, size, SETTINGS["max_sequences"], SETTINGS["max_length"], remember_freed=True)


def head_engine(llm: LLM, head_memory: int | None = None, **settings: object) -> Engine:
    """An engine that drafts with the head wherever it can, and records its drafts."""
    before, config = llm.engine.planner.drafts.model, config_on_gpu(llm, **settings)
    for seat in range(config.max_sequences):
        before.hidden.forget(seat)
    parts = (before.hidden, fresh_ledger(llm, head_memory), before.executor, 256, config.max_tokens_per_step, True)
    drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=DraftHead.name)
    return Engine(llm.engine.ledger.spec, llm.engine._device, config, drafting=drafting, draft_model=Recording(*parts))


WITH_HEADS = for_each(FAMILIES, "tiny {} float32 mtp")
ONE_HEAD = for_each(["qwen3_5"], "tiny {} float32 mtp")


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", WITH_HEADS)
def test_a_head_on_a_gpu_drafts_as_a_plain_implementation_and_changes_no_token(family: str, depth: int) -> None:
    llm = gpu_llm(family)
    asks = [Ask(tokens(150, 1), greedy(40)), Ask(tokens(30, 2), seeded(30, 3), step=1), Ask([7], greedy(20), step=2)]
    wanted = serve(plain_engine(llm, depth=depth), asks)
    engine = head_engine(llm, depth=depth, max_tokens_per_step=96)
    engine.planner.drafts.model.answers = {tuple(asks[0].prompt): wanted[0].tokens}
    found = serve(engine, asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert engine.planner.drafting.counts.accepted.total() > 5
    check_drafts(engine, family, least=20)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ONE_HEAD)
def test_after_a_hit_on_a_gpu_a_head_drafts_as_in_a_cold_run(family: str) -> None:
    check_hits(head_engine(gpu_llm(family), depth=1))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ONE_HEAD)
def test_preemptions_on_a_gpu_change_neither_drafts_nor_answers(family: str) -> None:
    llm, preemptions = gpu_llm(family), 0
    asks = [Ask(tokens(20 + 7 * n, n), greedy(200), step=n) for n in range(6)]
    wanted = serve(plain_engine(llm), asks)
    spec, own = llm.engine.ledger.spec, llm.engine.planner.drafts.model.ledger.spec
    seats = SETTINGS["max_sequences"]
    # What one sequence needs, and some more: several begin, and not all can end beside each other.
    for tenths in (12, 16, 20):
        memory = tenths * smallest_memory(family, 250, seats, spec) // 10
        engine = head_engine(llm, 2 * smallest_memory(family, 200, seats, own), memory=memory, depth=1)
        found = serve(engine, asks)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
        check_drafts(engine, family, least=10)
        preemptions += engine.planner.preemptions
    assert preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ONE_HEAD)
def test_no_launch_of_a_head_waits_for_the_gpu(family: str) -> None:
    llm = gpu_llm(family)
    engine = head_engine(llm, paranoid=False)
    for device in (llm.engine._device, engine.planner.drafts.model.executor):
        device.launch = partial(launch_without_waiting, device.launch)
    try:
        found = serve(engine, [Ask(tokens(90, n), greedy(30), step=n) for n in range(3)])
    finally:
        for device in (llm.engine._device, engine.planner.drafts.model.executor):
            del device.launch
    assert all(len(answer.tokens) == 30 for answer in found)
    assert len(engine.planner.drafts.model.seen) > 20


def launch_without_waiting(launch: Callable[[Plan], Flight], plan: Plan) -> Flight:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ONE_HEAD)
def test_random_requests_choose_from_the_same_logits_with_a_head_on_a_gpu(family: str, rounds: int) -> None:
    llm, counts = gpu_llm(family), Counter[str]()
    spec, device = llm.engine.ledger.spec, llm.engine._device
    for seed in range(rounds):
        random = Random(f"gpu {seed}")
        asked = wishes(random, exact=False)
        plain = WatchedEngine(spec, device, config_on_gpu(llm))
        answers = answer_all(plain, asked)
        plain.choices.leave()
        before = llm.engine.planner.drafts.model
        for seat in range(SETTINGS["max_sequences"]):
            before.hidden.forget(seat)
        head = DraftHead(before.hidden, fresh_ledger(llm), before.executor, 256, 96, True)
        drafting = Drafting(ROOM, costs=FreeDrafts(), suffixes=False, model=head.name)
        config = config_on_gpu(llm, depth=seed % 2, max_tokens_per_step=random.choice([70, 200, 512]))
        engine = WatchedEngine(spec, device, config, drafting=drafting, draft_model=head)
        drafted = answer_all(engine, asked)
        engine.choices.leave()
        counts["drafted"] += drafting.counts.proposed.total()
        for ask, one, other in zip(asked, answers, drafted, strict=True):
            compare(ask, one, other, exact=False, counts=counts)
    print(dict(counts))
    assert counts["drafted"] > 30 * rounds


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        pytest.param(one, other, id=f"tiny {one} float32 drafted by {other}{GROUP}")
        for one, other in (("qwen3_5", "qwen3_5"), ("qwen3_5", "gemma3"), ("gemma3", "falcon_h1"))
    ],
)
def test_a_draft_model_on_a_gpu_changes_no_token(family: str, drafter: str, depth: int, tmp_path: Path) -> None:
    def load() -> LLM:
        target, small = (Oracle(ALL_TINY[each]).save(tmp_path / each) for each in (family, drafter))
        return open_gpu(target, str(small))

    llm = held(f"tiny {family} float32 drafted by {drafter}", load)
    asks = [
        Ask(tokens(57, 1), greedy(40)),
        Ask(tokens(130, 2), seeded(30, 7, top_k=9), step=1),
        Ask(tokens(57, 1)[:40] + tokens(30, 3), greedy(40, repetition_penalty=1.2), step=9),
    ]
    wanted = serve(plain_engine(llm), asks)
    before = llm.engine.planner.drafts.model
    model = DraftModel(fresh_ledger(llm), before.executor, 256, 96, paranoid=True)
    drafting = Drafting(ROOM, costs=FreeDrafts(), suffixes=False, model=model.name)
    config = config_on_gpu(llm, depth=depth, max_tokens_per_step=96)
    found = serve(Engine(llm.engine.ledger.spec, llm.engine._device, config, None, drafting, model), asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert drafting.counts.proposed.total() > 0
    if family == drafter:
        # Greedy rows without penalties are guessed by nearly the same arithmetic.
        report = found[0].report.drafts
        assert report.accepted > 0.8 * report.proposed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", for_each(["qwen3.5-9b"]))
def test_a_head_of_a_published_size_runs_with_kernels_compiled_ahead(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    release()
    # The head takes some of what the arena leaves.
    with load(few_layers(packaged(name)), "bfloat16", ARENA_BYTES // 2, is_compiled_ahead=True, draft="mtp") as llm:
        head = llm.engine.planner.drafts.model
        assert head.executor.recorded is not None
        assert llm.engine.config.draft_bytes > 0
        drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=head.name)
        engine = Engine(llm.engine.ledger.spec, llm.engine._device, llm.engine.config, None, drafting, head)
        asks = [Ask(tokens(100 + n, n), greedy(20)) for n in range(8)]
        assert all(len(answer.tokens) == 20 for answer in serve(engine, asks))
        assert drafting.counts.proposed.total() > 100
