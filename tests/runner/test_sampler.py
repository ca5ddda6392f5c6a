"""The sampler against plain definitions, one row at a time, in float64 and without tensors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.runner.sampler import (
    VOCAB,
    Row,
    choices_of,
    choose,
    is_borderline,
    is_right,
    plain_distribution,
    plan_of,
    rows,
)
from weft.base.plan import BANNED
from weft.runner.sampler import sample


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(rows(), min_size=1, max_size=5))
def test_every_row_draws_from_its_plain_definition(batch):
    for row, token in zip(batch, choose(batch)):
        assert is_borderline(row) or is_right(row, token)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(rows(), min_size=2, max_size=7), st.randoms())
def test_company_and_order_change_nothing_for_a_row(batch, random):
    alone = [choose([row])[0] for row in batch]
    assert choose(batch) == alone
    order = list(range(len(batch)))
    random.shuffle(order)
    assert choose([batch[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("threads", [1, 2])
def test_company_changes_nothing_for_a_large_vocabulary(threads):
    """Large enough for PyTorch to split a row between threads and for the sampler to work in chunks."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        random = np.random.default_rng(0)
        batch = [
            Row(random.normal(0, 2, 100_000), uniform=u, top_k=k, top_p=p, temperature=t)
            for u, k, p, t in [(0.3, 0, 1.0, 1.0), (0.99, 50, 0.9, 0.7), (0.5, 0, 0.95, 1.3), (0.1, 0, 1.0, 0.0)]
        ]
        assert choose(batch) == [choose([row])[0] for row in batch]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
        {"repetition": 1.5, "prompt": [1, 2, 3], "answer": [3, 4]},
        {"presence": 1.0, "frequency": 0.5, "prompt": [1], "answer": [3, 3, 4], "board": 3},
        {"bias": {7: -np.inf, 8: 2.0}},
        {"bans": [(7, 3), (8, 4)], "board": 3, "allowed": [7, 8, 9, 30]},
    ],
    ids=str,
)
def test_many_draws_follow_the_distribution(wishes):
    """The draws of evenly spread random numbers have the right frequencies (inverse transform sampling)."""
    logits = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
    count = 4000
    batch = [Row(logits, uniform=(i + 0.5) / count, **wishes) for i in range(count)]
    frequency = np.bincount(choose(batch), minlength=VOCAB) / count
    np.testing.assert_allclose(frequency, plain_distribution(batch[0]), atol=1.01 / count)


def test_logits_of_16_bits_are_widened_to_pytorchs_floats():
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(4, -1)
    for count in (1, 2, 4):
        found = CPU.for_sampling(every[:count])
        assert torch.equal(found.view(torch.int32), every[:count].float().view(torch.int32))


THREADS = """
import os, numpy, torch
from tests.support.kernels.operations import CPU
from weft.kernels.sampling import Draws
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
logits, allowed = torch.from_numpy(numpy.zeros((16, 8192), "f")), torch.from_numpy(numpy.zeros((16, 1024), "u1"))
before = count()
CPU.likeliest(CPU.restrict(logits, allowed))
ones, row = torch.ones(16), torch.arange(16)
top_k = torch.full((16,), 5)
draws = Draws(row=row, temperature=ones, top_p=0.9 * ones, log_min_p=-9 * ones, top_k=top_k, uniform=0.5 * ones,
              filtered=(True,) * 16, ordered=(True,) * 16)
CPU.score(logits, CPU.draw(logits, draws), 3)
after, threads = count(), torch.get_num_threads()
torch.where(logits > 0, logits, 1.0)
print(after - before, threads, count() - after)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_samples_of_many_rows_start_no_threads_of_pytorch():
    """Its threads poll for work for a while, on the cores of the kernels' own ones."""
    found = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "3", "2"]


def test_random_numbers_draw_by_chance():
    """Chi-square of 20,000 independent draws: 39 degrees of freedom, 5 standard deviations."""
    random = np.random.default_rng(5)
    logits = random.normal(0, 1, VOCAB).astype(np.float32)
    batch = [Row(logits, uniform=u) for u in random.random(20_000, dtype=np.float32)]
    seen = np.bincount(choose(batch), minlength=VOCAB)
    expected = plain_distribution(batch[0]) * len(batch)
    assert ((seen - expected) ** 2 / expected).sum() < 39 + 5 * np.sqrt(2 * 39)


def test_the_extremes_of_the_random_number_stay_within_the_kept_tokens():
    logits = np.random.default_rng(1).normal(0, 1, VOCAB)
    for uniform in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
        for wishes in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"bias": {0: -np.inf, VOCAB - 1: -np.inf}}):
            row = Row(logits, uniform=uniform, **wishes)
            assert plain_distribution(row)[choose([row])[0]] > 0


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = np.random.default_rng(1).normal(0, 30, VOCAB).astype(np.float32)
    assert choose([Row(logits, temperature=1e-38, uniform=0.999)]) == [int(logits.argmax())]


def test_top_k_of_one_is_greedy_even_among_equals():
    logits = np.zeros(VOCAB, np.float32)
    logits[[11, 23]] = 4.0
    assert choose([Row(logits, top_k=1, uniform=0.99)]) == [11]


def test_rows_that_are_not_numbers_harm_nobody():
    good = Row(np.random.default_rng(1).normal(0, 1, VOCAB), top_p=0.9, uniform=0.7)
    bad = Row(np.full(VOCAB, np.nan), top_p=0.9, uniform=0.7)
    banned = Row(np.zeros(VOCAB), bias=dict.fromkeys(range(VOCAB), -np.inf))
    chosen = choose([bad, good, banned])
    assert chosen[1] == choose([good])[0]
    assert all(0 <= token < VOCAB for token in chosen)


def test_scores_are_log_probabilities_of_the_raw_logits():
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (5, VOCAB)).astype(np.float32))
    chosen = torch.tensor([0, 3, 7, 11, 39])
    own, top_token, top_logprob = CPU.score(logits, chosen, 4)
    plain = logits.double().log_softmax(-1)
    torch.testing.assert_close(own.double(), plain[range(5), chosen], rtol=0, atol=1e-5)
    assert top_token.tolist() == plain.argsort(-1, descending=True)[:, :4].tolist()
    torch.testing.assert_close(top_logprob.double(), plain.gather(-1, top_token), rtol=0, atol=1e-5)


def test_equal_scores_are_ranked_by_token_whatever_number_is_asked_for():
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 1
    for top in (1, 3, 20):
        assert CPU.score(logits, torch.tensor([0, 0]), top)[1].tolist() == [[5, 0, 1, 2, 3, 4, *range(6, 20)][:top]] * 2
    assert CPU.score(logits, torch.tensor([0, 0]), 0)[1].shape == (2, 0)


def test_where_a_mask_leaves_only_banned_tokens_one_of_them_is_chosen():
    logits = np.random.default_rng(2).normal(0, 3, VOCAB).astype(np.float32)
    for temperature in (0.0, 0.01, 1.0):
        banned = {"bans": [(7, 3)] * 3, "bias": {9: BANNED}, "board": 3, "temperature": temperature}
        assert choose([Row(logits, allowed=[7, 9], **banned)])[0] in (7, 9)
        assert choose([Row(logits, allowed=[7, 9, 11], **banned)]) == [11]


def test_a_ban_looks_at_the_board_of_its_own_row():
    logits = np.arange(VOCAB, dtype=np.float32)
    batch = [Row(logits, temperature=0.0, board=board, bans=[(VOCAB - 1, 2)]) for board in (1, 2, 3, 1, 1)]
    assert choose(batch) == [VOCAB - 1, VOCAB - 2, VOCAB - 1, VOCAB - 1, VOCAB - 1]


@pytest.mark.parametrize("operations", [CPU, PLAIN], ids=["cpu", "plain"])
def test_tokens_beyond_a_short_mask_are_not_allowed(operations):
    row = Row(np.arange(VOCAB, dtype=np.float32), temperature=0.0, allowed=[3, 5])
    plan = plan_of([row])
    short = replace(plan, sampling=replace(plan.sampling, mask_bits=plan.sampling.mask_bits[:, :1].copy()))
    logits = torch.from_numpy(row.logits)[None]
    assert sample(logits, choices_of(short, VOCAB), torch.zeros(1, dtype=torch.long), operations).tolist() == [5]
