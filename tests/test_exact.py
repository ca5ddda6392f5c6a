"""Exact mode on a CPU: logits have the same bits, whatever is cached, batched, chunked, preempted or evicted."""

from __future__ import annotations

import pytest
import torch

from tests.engines import FAMILIES
from tests.exact_traffic import check_traffic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_digest_is_that_of_a_lone_cold_run(family: str, dtype: str) -> None:
    check_traffic(family, DTYPES[dtype], seed=1, count=6)
