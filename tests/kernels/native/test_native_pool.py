"""Threads of the native kernels: every piece is done once, whoever else asks or sleeps meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.kernels.operations import linear
from weft.kernels.native import library

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def products(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        weight = torch.randn(700, 40, generator=generator)
        yield torch.randn(2, 40, generator=generator), weight


def wrong(count, seed):
    return [
        not torch.allclose(linear(x, weight), (x.double() @ weight.double().t()).float(), atol=1e-4)
        for x, weight in products(count, seed)
    ].count(True)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_more_threads_than_cores_do_every_piece_once(threads, count):
    threads(count)
    assert wrong(300, seed=count) == 0


def test_threads_that_went_to_sleep_are_woken(threads):
    threads(3)
    for seed in range(5):
        assert wrong(3, seed) == 0
        time.sleep(0.01)


def test_callers_at_the_same_time_do_not_meet(threads):
    threads(2)
    found = []

    def call(seed):
        torch.set_num_threads(2)
        found.append(wrong(200, seed))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [0, 0, 0]
