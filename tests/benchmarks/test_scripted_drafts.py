"""The kernel of `benchmarks.drafts` accepts what its script says, as the operators that it replaces do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.drafts import Script
from weft.kernels.following import DraftSamples


def test_a_kernel_reads_the_script_as_operators_do():
    scripted = pytest.importorskip("benchmarks.scripted_drafts", exc_type=ImportError)
    random = np.random.default_rng(3)
    script, rows = Script(6, "cpu"), 4
    script.begin([0.8] * 3)
    turns = script.device_rows.clone()
    boards = [torch.zeros(2, 7, dtype=torch.int64) for _ in range(2)]
    for _ in range(5):
        count = torch.from_numpy(random.integers(0, 4, rows).astype(np.int32))
        sample = torch.cumsum(count + 1, 0).int() - count - 1
        seat = torch.from_numpy(random.permutation(6)[:rows].astype(np.int32))
        samples = DraftSamples(seat, sample, sample, count, 3)
        tokens = torch.from_numpy(random.integers(1, 1000, int((count + 1).sum())).astype(np.int32))
        script.verify_drafts(tokens, tokens, samples, *boards[0])
        scripted.verify(tokens, samples, script.device_right, turns, *boards[1])
        assert torch.equal(*boards)
        assert torch.equal(turns, script.device_rows)
    assert boards[0].any()
