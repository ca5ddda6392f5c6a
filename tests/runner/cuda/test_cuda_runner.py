"""The runner of a GPU on a CPU: the same padded inputs and kernels (interpreted), without recording."""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.engine.late_masks import HashedConstraint
from tests.support.kernels.operations import GPU_ROWS, PLAIN
from tests.support.kernels.plans import Capture, Row, make_plan
from tests.support.models.engines import Ask, dummy_model, greedy, seeded, serve, tokens
from tests.support.runner.cuda_runner import FEW_LAYERS, SHORT_CELL, SPEC, cpu_engine, cuda_engine, prompt_inputs
from weft.device.store import Store
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch
from weft.runner.cuda import recorded
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import Size, trial
from weft.runner.cuda.recorded import RecordedSteps, StepRecording, buckets, prompt_sizes
from weft.runner.runner import Runner


def inputs_for(rows: int) -> DecodeInputs:
    store = Store(SPEC, 1 << 16, scratch=True)
    return DecodeInputs(rows, 10, SPEC, store.scratch, "cpu", GPU_ROWS)


def decode_rows() -> list[Row]:
    return [
        Row(9, 10, read_slot=3, tail=1, seat=5, from_board=1, pages=[4, 7], window_pages=[11, 13]),
        Row(0, 1, tail=2, seat=6, tokens=[42], pages=[5], window_pages=[14]),
        Row(31, 32, read_slot=1, tail=3, seat=4, from_board=1, pages=[1, 2, 3, 9], window_pages=[31], window_first=3),
    ]


def test_inputs_of_a_recorded_step_say_what_the_batch_says():
    plan = make_plan(decode_rows(), [Capture(2, 32, 8)])
    inputs = inputs_for(6)
    inputs.fill_with_padding()
    inputs.fill(plan, 4)
    found = inputs.batch(4, inputs.tensor("token", 4))
    wanted = build_batch(plan, SPEC, torch.zeros(9, dtype=torch.int64), "cpu", GPU_ROWS)
    for name in ("start", "slot", "tail", "closing"):
        assert getattr(found, name)[:3].tolist() == getattr(wanted, name).tolist(), name
    assert found.first.tolist() == [0, 1, 2, 3, 4]
    assert found.cell == wanted.cell
    for name in ("full", "windowed"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert mine.write_page[:3].tolist() == theirs.write_page.tolist()
        assert mine.first_position[:3].tolist() == theirs.first_position.tolist()
        assert mine.bounds[:4].tolist() == theirs.bounds.tolist()
        assert mine.pages[: len(theirs.pages)].tolist() == theirs.pages.tolist()


def test_padding_owns_nothing():
    inputs = inputs_for(6)
    inputs.fill(make_plan(decode_rows()), 5)
    batch = inputs.batch(5, inputs.tensor("token", 5))
    store = Store(SPEC, 1 << 16, scratch=True)
    assert (1 << 16) // min(store.unit_bytes.values()) >= 3
    for kind, index in store.scratch.items():
        assert index * store.unit_bytes[kind] >= 1 << 16, "behind all that the arena gives out"
        assert (index + 1) * store.unit_bytes[kind] <= len(store.buffer)
    assert batch.start[3:].tolist() == [0, 0]
    assert batch.closing[3:].tolist() == [-1, -1]
    for paging in (batch.full, batch.windowed):
        assert (paging.bounds[1:] - paging.bounds[:-1])[3:].tolist() == [1, 1]
        last = int(paging.bounds[-1])
        assert paging.pages[last - 2 : last].tolist() == paging.write_page[3:].tolist()
    assert inputs.tensor("seat", 5)[3:].tolist() == [6, 6]


def test_scratch_units_do_not_overlap():
    store = Store(SPEC, 1 << 16, scratch=True)
    spans = sorted((i * store.unit_bytes[k], (i + 1) * store.unit_bytes[k]) for k, i in store.scratch.items())
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 300, 1000])
def test_every_number_of_rows_has_a_bucket(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(any(size >= rows for size in sizes) for rows in range(1, most + 1))


def prompt_rows() -> list[Row]:
    """Two decodes and two prompts, one of them behind what is known, with its first token still on the device."""
    return [
        *decode_rows()[:2],
        Row(13, 30, read_slot=2, tail=4, seat=1, from_board=1, pages=[6, 8, 10, 12], window_pages=[16, 17, 18, 19]),
        Row(0, 5, tail=5, seat=2, tokens=[7, 8, 9, 10, 11], pages=[15], window_pages=[20]),
    ]


def test_inputs_of_a_step_with_prompts_say_what_the_batch_says():
    plan = make_plan(prompt_rows(), [Capture(2, 24, 8), Capture(2, 16, 9)])
    inputs = prompt_inputs(Size(3, 4, 40))
    inputs.fill(plan)
    found, wanted = inputs.step.batch, build_batch(plan, SPEC, torch.arange(9), "cpu", GPU_ROWS)
    mine, theirs = found, wanted
    place = [0, 1, 3, 4]
    for name in ("start", "slot", "tail", "closing"):
        assert getattr(mine, name)[place].tolist() == getattr(theirs, name).tolist(), name
    tokens = [*range(2), *range(3, 25)]
    assert mine.first[place].tolist() == [0, 1, 3, 20]
    assert found.positions[tokens].tolist() == wanted.positions.tolist()
    for name in ("full", "windowed"):
        pages, known = getattr(mine, name), getattr(theirs, name)
        assert pages.write_page[tokens].tolist() == known.write_page.tolist()
        assert pages.first_position[place].tolist() == known.first_position.tolist()
        for row, at in enumerate(place):
            low, high = known.bounds[row : row + 2].tolist()
            assert pages.pages[pages.bounds[at] : pages.bounds[at + 1]].tolist() == known.pages[low:high].tolist()
    pieces = theirs.pieces
    assert mine.piece_position[:pieces].tolist() == theirs.piece_position.tolist()
    assert mine.piece_slot[:pieces].tolist() == theirs.piece_slot.tolist()
    assert mine.piece_row[:pieces].tolist() == [place[row] for row in theirs.piece_row.tolist()]
    assert mine.first_piece[:3].tolist() == theirs.first_piece.tolist()
    assert inputs.step.answer.tolist() == [0, 1, 19, 24, 0, 0]
    assert inputs.step.answer_seat.tolist() == [5, 6, 1, 2, 9, 9]
    assert inputs.step.from_board.tolist() == [1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("lengths", [(2,), (37,), (8, 8), (9, 23, 5), (3, 3, 31)])
@pytest.mark.parametrize("first", [0, 7, 13])
def test_padding_beside_prompts_owns_nothing(lengths, first):
    size = Size(2, 4, 40)
    rows = [Row(first, first + n, read_slot=1, tail=1, pages=[1] * 8, window_pages=[1] * 8) for n in lengths]
    inputs = prompt_inputs(size)
    before = inputs.step.batch
    inputs.fill(make_plan(rows, [Capture(0, first + 2, 3)] if (first + 2) % 8 == 0 else []))
    batch, scratch = inputs.step.batch, inputs.scratch
    assert batch is before
    lengths = (batch.first[1:] - batch.first[:-1]).tolist()
    assert min(lengths) > 0
    assert sum(lengths) == size.all_tokens
    real = slice(size.decodes, size.decodes + len(rows))
    padding = [*range(size.decodes), *range(real.stop, size.rows)]
    assert set(batch.tail[padding].tolist()) == {scratch["tail"]}
    assert batch.start[padding].tolist() == [0] * len(padding)
    used = int(batch.first_piece[len(rows)])
    assert set(batch.piece_slot[used:].tolist()) == {-1}
    ends = [batch.start[row] + lengths[row] for row in range(size.rows)]
    for piece in range(int(batch.first_piece[-1]), size.pieces(SPEC.cell)):
        assert batch.piece_position[piece] >= ends[batch.piece_row[piece]], "behind the end of its row"
    for kind, paging in (("page", batch.full), ("window", batch.windowed)):
        for row in padding:
            low, high = paging.bounds[row : row + 2].tolist()
            assert set(paging.pages[low:high].tolist()) == {scratch[kind]}


@pytest.mark.parametrize("most", [1, 4, 8, 100, 256])
def test_prompts_take_the_smallest_size_that_holds_them(most, monkeypatch):
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (64, 128, 320))
    sizes = prompt_sizes(most)
    assert [size.all_tokens for size in sizes] == sorted(size.all_tokens for size in sizes)
    assert max(size.decodes for size in sizes) == min(most, 128)
    assert sizes[0].holds(0, 1, 63)
    assert not sizes[0].holds(0, 1, 64), "padding needs a token too"
    assert not sizes[0].holds(0, 2, 9), "one row at least is padding"
    assert not any(size.holds(min(most, 128) + 1, 1, 8) for size in sizes)
    wide = next(size for size in sizes if size.decodes)
    assert wide.holds(wide.decodes, 3, 63)
    assert not wide.holds(0, 1, 62), "every row of padding needs one"
    assert not wide.holds(0, 4, 9)


@pytest.mark.parametrize(
    ("family", "is_recorded"), [("lfm2", False), ("lfm2", True), ("qwen3_5", True), ("gemma3", True)]
)
def test_a_step_with_kernels_of_a_gpu_equals_the_reference(family, is_recorded, monkeypatch):
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", (16, 32) if is_recorded else ())
    replayed, run = [], RecordedSteps.run
    monkeypatch.setattr(RecordedSteps, "run", lambda *call: replayed.append(run(*call)) or replayed[-1])
    shared = tokens(18, seed=1)
    asks = [
        Ask([*shared, *tokens(2, seed=2)], greedy(2)),
        Ask(tokens(3, seed=3), seeded(3, seed=7)),
        # A hit on what the first one left, beside a decode.
        Ask([*shared, *tokens(3, seed=4)], greedy(1), step=2),
    ]
    model = dummy_model(FEW_LAYERS[family], operations=PLAIN)
    found, wanted = serve(cuda_engine(model, max_sequences=3), asks), serve(cpu_engine(model), asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for mine, theirs in zip(found, wanted):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
    assert found[2].report.cached_tokens >= SHORT_CELL
    # Two prompts, a decode of both, a prompt beside a decode, and the rest.
    assert [outcome is not None for outcome in replayed[:3]] == [is_recorded, True, is_recorded]


@pytest.mark.kernels
@pytest.mark.parametrize("depth", [0, 1])
def test_choices_that_depend_on_the_input_are_those_of_the_reference(depth):
    """A recorded step leaves its likeliest tokens on the board, where the inputs were."""
    model = dummy_model(FEW_LAYERS["lfm2"], operations=PLAIN)
    answer = serve(cpu_engine(model), [Ask(tokens(12, seed=1), greedy(8))])[0].tokens
    words = tuple(pairwise(answer[2:6]))
    asks = [
        Ask(tokens(12, seed=1), greedy(8)),
        Ask(tokens(12, seed=1), greedy(8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)),
        Ask(tokens(9, seed=2), seeded(8, seed=5, top_k=9, top_p=0.9, repetition_penalty=1.5)),
        Ask(tokens(12, seed=1), greedy(8, bad_words=words)),
    ]
    wanted = [answer.tokens for answer in serve(cpu_engine(model), asks)]
    assert wanted[3] != wanted[0] != wanted[1], "penalties and bad words must matter"
    found = serve(cuda_engine(model, depth=depth), asks)
    assert [answer.tokens for answer in found] == wanted


def constrained_answers(engine: Engine) -> list[list[int]]:
    """Answers of a constrained row beside one that draws, and whose mask is known in advance."""
    found: dict[int, list[int]] = {}
    for seed, params in ((1, greedy(4)), (2, seeded(4, seed=7, allowed_token_ids=range(90)))):
        constraint = HashedConstraint(seed, engine._device.model.vocab_size) if seed == 1 else None
        found[engine.add(Request(np.array(tokens(2, seed=seed), np.int32), params), constraint)] = []
    while not engine.idle:
        for output in engine.step():
            found[output.sequence] += [] if output.token is None else [output.token]
    return list(found.values())


@pytest.mark.parametrize("is_recorded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_masks_that_follow_a_launch_choose_as_those_that_travel_with_it(is_recorded, monkeypatch):
    if not is_recorded:
        monkeypatch.setattr(RecordedSteps, "run", lambda *_: None)
    model = dummy_model(FEW_LAYERS["lfm2"], operations=PLAIN)
    late, supply = [], Runner.supply_masks

    def counted(self, flight, masks):
        late.append(len(masks))
        supply(self, flight, masks)

    monkeypatch.setattr(Runner, "supply_masks", counted)
    engine = cuda_engine(model, max_sequences=2, max_tokens_per_step=16)
    assert constrained_answers(engine) == constrained_answers(cpu_engine(model))
    assert sum(late) >= 3


@pytest.mark.kernels
def test_a_state_that_is_no_power_of_two_runs_in_the_kernels_of_a_gpu(monkeypatch):
    monkeypatch.setattr(recorded, "PROMPT_TOKENS", ())
    tiny, asks = FEW_LAYERS["falcon_h1"], [Ask(tokens(19, seed=1), greedy(2)), Ask(tokens(3, seed=3), greedy(3))]
    wanted = serve(cpu_engine(dummy_model(tiny)), asks)
    found = serve(cuda_engine(dummy_model(tiny, operations=PLAIN), max_sequences=2), asks)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for mine, theirs in zip(found, wanted):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)


def test_the_trial_of_a_step_runs_on_units_that_nobody_owns():
    model = dummy_model(FEW_LAYERS["lfm2"], operations=PLAIN)
    spec = MemorySpec(model.memories(GPU_ROWS), SHORT_CELL)
    runner = Runner(model, spec, 1 << 16, 4, operations=GPU_ROWS, recording=StepRecording(256))
    before = runner.store.buffer[: 1 << 16].clone()
    for start, end in (([0], [20]), ([0, 0], [1, 1])):
        plan = trial(np.array(start, np.int32), np.array(end, np.int32), spec, runner.store.scratch)
        runner.run(plan)
    assert torch.equal(runner.store.buffer[: 1 << 16], before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recorded_steps_share_the_memory_of_their_logits(dtype):
    def step(rows):
        logits = x[:rows] @ weight + rows
        return recorded.StepOutput(logits, logits[:, 0].clone(), logits[:, 0].clone())

    x, weight = torch.randn(1024, 64, device="cuda", dtype=dtype), torch.randn(64, 50_000, device="cuda", dtype=dtype)
    wanted = x @ weight
    gc.collect()
    pool, before = torch.cuda.graph_pool_handle(), torch.cuda.memory_allocated()
    steps = [(*recorded.record(partial(step, rows), pool), rows) for rows in (1024, 512, 511, 256, 8)]
    grown = torch.cuda.memory_allocated() - before
    assert grown < wanted.nbytes // 10
    for replay, output, rows in (*steps, *steps[::-1]):
        replay()
        logits = output.logits
        assert (logits.shape, logits.dtype) == (wanted[:rows].shape, dtype)
        assert torch.allclose(logits.float(), (wanted[:rows] + rows).float(), rtol=2e-2, atol=2e-1)
