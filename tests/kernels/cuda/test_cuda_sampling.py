"""Sampling on a GPU chooses as the sampler's reference does: small vocabularies anywhere, real ones on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.compiled import assert_compiles
from tests.support.kernels.operations import CPU, GPU, PLAIN
from tests.support.runner.sampler import Row, choices_of, ints, is_borderline, is_right, numbers, plan_of
from weft.device.upload import upload
from weft.kernels.cuda import following, sampling
from weft.kernels.cuda.sampling import scores as sampling_scores
from weft.kernels.following import DraftSamples
from weft.kernels.sampling import Draws
from weft.memory.kinds import Kind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner import sampler
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.step_sampling import stage_sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 40


def on_device(rows: list[Row], draw=sampling.draw) -> list[int]:
    """What the kernels draw."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows]).astype(np.float32)).to(DEVICE)
    draws = choices_of(plan_of(rows), logits.shape[-1]).draws
    wishes = {
        name: getattr(draws, name).to(DEVICE) for name in ("temperature", "log_min_p", "uniform", "top_k", "top_p")
    }
    return draw(logits, replace(draws, **wishes)).tolist()


@st.composite
def rows(draw) -> Row:
    seed = draw(st.integers(0, 2**32 - 1))
    off_or = lambda off, strategy: draw(st.one_of(st.just(off), strategy))  # noqa: E731
    # Steps as coarse as half a nat make equals; a wide spread makes levels that nobody reaches.
    logits = np.random.default_rng(seed).normal(0, draw(st.sampled_from([1, 3, 20])), VOCAB)
    return Row(
        logits=(np.round(logits * 2) / 2 if draw(st.booleans()) else logits).astype(np.float32),
        temperature=draw(numbers(0.05, 5)),
        top_k=off_or(0, st.integers(2, VOCAB + 5)),
        top_p=off_or(1.0, numbers(0.01, 0.99)),
        min_p=off_or(0.0, numbers(0.01, 1)),
        uniform=draw(st.integers(0, 2**24 - 1)) / 2**24,
    )


def reference(row: Row, shift: float) -> int:
    """What the reference draws at a random number beside the row's own."""
    uniform = min(max(row.uniform + shift, 0.0), 1 - 2**-24)
    logits = torch.from_numpy(row.logits)[None]
    return CPU.draw(logits, choices_of(plan_of([replace(row, uniform=uniform)]), VOCAB).draws).item()


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_the_draw_equals_the_reference(batch):
    for row, token, plain in zip(batch, on_device(batch), on_device(batch, PLAIN.draw)):
        if not is_borderline(row):
            low, high = reference(row, -1e-5), reference(row, 1e-5)
            assert low <= token <= high
            assert low <= plain <= high


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(st.lists(rows(), min_size=2, max_size=4))
def test_company_changes_nothing_for_a_row(batch):
    assert on_device(batch) == [on_device([row])[0] for row in batch]


@pytest.mark.parametrize(
    ("wishes", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.99}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.2, "top_p": 0.99}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_floors_are_exact_where_weights_are(wishes, kept):
    """Halves and quarters: 4, 2, 2, 1, 0.5, 0.5 of 10."""
    weights = np.array([4, 2, 2, 1, 0.5, 0.5])
    if wishes.get("top_p") == 0.5:
        weights = np.array([5, 2, 1, 1, 0.5, 0.5])
    logits = np.log(weights).astype(np.float32)
    probable = np.where(np.isin(range(6), kept), weights, 0)
    count = 10
    batch = [Row(logits, uniform=(i + 0.37) / count, **wishes) for i in range(count)]
    wanted = np.searchsorted(probable.cumsum() / probable.sum(), [row.uniform for row in batch], side="right")
    assert on_device(batch) == wanted.tolist()


@pytest.mark.kernels
def test_a_vocabulary_of_several_chunks_is_drawn_by_its_definition():
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, 9001).astype(np.float32)
    wishes = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.3}]
    batch = [Row(logits, uniform=u, **wish) for wish, u in zip(wishes, (0.0, 0.31, 0.999, 0.5, 0.8))]
    for row, token in zip(batch, on_device(batch)):
        assert is_borderline(row) or is_right(row, token)


def test_rows_that_are_not_numbers_harm_nobody():
    good = Row(np.random.default_rng(1).normal(0, 1, VOCAB), top_p=0.9, uniform=0.7)
    bad = Row(np.full(VOCAB, np.nan), top_p=0.9, uniform=0.7)
    banned = Row(np.full(VOCAB, -np.inf), top_k=3, uniform=0.2)
    chosen = on_device([bad, good, banned])
    assert chosen[1] == on_device([good])[0]
    assert all(0 <= token < VOCAB for token in chosen)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = np.random.default_rng(1).normal(0, 30, VOCAB).astype(np.float32)
    for wishes in ({}, {"top_k": 5}, {"top_p": 0.5}):
        assert on_device([Row(logits, temperature=1e-38, uniform=0.999, **wishes)]) == [int(logits.argmax())]


def test_banned_tokens_are_never_drawn():
    logits = np.zeros(VOCAB, np.float32)
    logits[[0, 1, 7, VOCAB - 1]] = -np.inf
    for wishes in ({}, {"top_k": 39}, {"top_p": 0.999}):
        for uniform in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
            assert on_device([Row(logits, uniform=uniform, **wishes)])[0] not in (0, 1, 7, VOCAB - 1)


@pytest.mark.parametrize("vocab", [1, 8192, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_is_the_first_of_equals(vocab, dtype):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)
    logits[1] = torch.where(logits[1] > 0, 3.0, -2.0)
    logits[2], logits[3, :] = 0.0, -torch.inf
    logits[2, : vocab // 2] = -0.0
    logits[4], logits[5, vocab // 3 :: 7] = torch.nan, torch.nan
    wanted = logits.float().cpu().numpy().argmax(-1)
    found = sampling.likeliest(logits)
    assert found[:5].tolist() == wanted[:5].tolist()
    some = logits[5, found[5]]
    assert some.isnan() or some == logits[5].nan_to_num(-torch.inf).max(), "NaN among others leaves a token that exists"


@pytest.mark.parametrize("vocab", [40, 9001])
def test_scores_equal_the_reference(vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[1] = logits[1].round()
    logits[2, : vocab - 12] = -torch.inf
    chosen = torch.tensor([0, 3, vocab - 1, 11])
    for top in (0, 12):
        own, likely, values = CPU.score(logits, chosen, top)
        for score in (sampling_scores.score, PLAIN.score):
            ours = score(logits.to(DEVICE), chosen.to(DEVICE), top)
            assert ours[1].tolist() == likely.tolist()
            torch.testing.assert_close(ours[0].cpu(), own, rtol=0, atol=1e-5)
            torch.testing.assert_close(ours[2].cpu(), values, rtol=0, atol=1e-5)


def test_indices_of_32_bits_ban_penalise_and_bias_as_well():
    """What is uploaded for a GPU is not widened."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    seen = {"prompt": [1, 2], "answer": [3, 3], "board": 4, "repetition": 1.3, "presence": 0.5, "bias": {5: 2.0}}
    batch = [Row(row.numpy(), top_k=5, temperature=heat, **seen) for row, heat in zip(logits, (0.0, 1.0, 0.7))]
    sampling_wishes = replace(plan_of(batch).sampling, mask_row=ints([1]), mask_bits=np.array([[5, 0]], np.uint32))
    staged = stage_sampling(replace(plan_of(batch), sampling=sampling_wishes), VOCAB)
    chosen = []
    for widen in (True, False):
        choices = staged.finish(upload(dict(staged.arrays()), DEVICE, widen))
        found = sampler.sample(logits.to(DEVICE), choices, torch.tensor([4, 4, 4]).to(DEVICE), GPU)
        chosen.append(found.tolist())
    assert chosen[0] == chosen[1]
    assert chosen[0][1] in (0, 2)


def launch_all() -> None:
    one, whole = torch.ones(3), torch.ones(3, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(3, 131072, dtype=dtype)
        sampling.likeliest(logits)
        sampling.take_likeliest(logits, whole, whole.int())
        sampling.draw(logits, Draws(whole, one, one, one, (True,), (True,), whole, one))
        sampling_scores.score(logits, whole, 5)
    sampling.read_board(whole, whole.int(), whole.int(), whole.int())


def launch_following() -> None:
    memory, spec = {Kind.PAGE: 0, Kind.TAIL: 0}, MemorySpec((AttentionMemory(1, 4, "float32"),), draft_room=7)
    step = StepInputs(Size(256, 257, 1025, samples=1280), 256, 10, spec, memory, "cpu", GPU).step
    board = torch.zeros(257, dtype=torch.int64)
    refused, tokens = board.int(), torch.zeros(1280, dtype=torch.int32)
    following.move_rows(step.batch, step.following, step.seat, refused, refused)
    following.verify_drafts(tokens, step.batch.token_ids, step.drafts, board, refused)
    wide = DraftSamples(*(each.long() for each in (step.seat, step.seat, step.seat, step.seat)), 7)
    following.verify_drafts(board, step.batch.token_ids, wide, board, refused)


@pytest.mark.kernels
def test_kernels_compile_for_sm_90():
    assert_compiles(launch_all, launch_following)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_go_to_their_seats_and_are_read_from_there(device):
    logits = torch.randn(5, 9000, device=device)
    board, seat = (
        torch.arange(100, 112, device=device),
        torch.tensor([7, 0, 11, 3, 4], dtype=torch.int32, device=device),
    )
    wanted = board.clone()
    wanted[seat.long()] = logits.argmax(-1)
    taken = sampling.take_likeliest(logits, board, seat)
    assert torch.equal(board, wanted)
    assert taken.dtype == torch.int32
    assert torch.equal(taken.long(), logits.argmax(-1))
    known = torch.arange(5, dtype=torch.int32, device=device)
    from_board = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32, device=device)
    read = sampling.read_board(board, seat, from_board, known)
    assert read.tolist() == [taken[0], 1, taken[2], 3, taken[4]]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [65_536, 131_072, 262_144])
def test_real_vocabularies_are_drawn_as_by_the_reference(vocab):
    random = np.random.default_rng(vocab)
    wishes = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.05}, {"top_p": 0.999}]
    batch = [
        Row(random.normal(0, spread, vocab).astype(np.float32), uniform=u, **wish)
        for spread in (0.5, 3)
        for wish in wishes
        for u in random.random(4, dtype=np.float32).tolist()
    ]
    logits = torch.from_numpy(np.stack([row.logits for row in batch]))
    wanted = CPU.draw(logits, choices_of(plan_of(batch), vocab).draws).tolist()
    ours = on_device(batch)
    assert sum(a == b for a, b in zip(ours, wanted)) >= len(batch) - 2
    assert ours[5:9] == on_device(batch[5:9])


@pytest.mark.gpu
def test_the_likeliest_may_be_recorded():
    logits = torch.randn(256, 131_072, device="cuda")
    sampling.likeliest(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = sampling.likeliest(logits)
    logits.copy_(torch.randn(256, 131_072, device="cuda"))
    graph.replay()
    assert torch.equal(token, logits.argmax(-1))


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    seen = {"prompt": [1, 2], "answer": [3, 3], "board": 4, "repetition": 1.3, "presence": 0.5, "bias": {5: 2.0}}
    batch = [Row(np.random.default_rng(i).normal(0, 3, 5000), top_k=20, top_p=0.9, **seen) for i in range(4)]
    masks = {"mask_row": ints([1]), "mask_bits": np.full((1, 157), -1, np.int32)}
    plan = plan_of(batch)
    staged = stage_sampling(replace(plan, sampling=replace(plan.sampling, **masks)), 5000)
    choices = staged.finish(upload(dict(staged.arrays()), "cuda", widen=False))
    logits, board = torch.randn(4, 5000, device="cuda"), torch.full((4,), 4, device="cuda")

    def step():
        sampling_scores.score(logits, sampler.sample(logits, choices, board, GPU), 5)
        sampling.likeliest(logits)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
