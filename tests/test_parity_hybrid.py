"""Hybrid families equal their public implementation."""

from __future__ import annotations

import pytest
import torch

from tests.hybrid_models import HYBRIDS, ODD_HYBRIDS
from tests.oracle import Oracle, assert_parity, make_pair


def remember_longer(oracle: Oracle) -> None:
    """Decays between one and some hundred tokens: the initial ones forget within two, and hide a wrong state."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in oracle.model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(0.5, 8.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                tensor.uniform_(-4.0, 0.0, generator=generator)
            elif name.endswith("embeddings.weight"):
                tensor.normal_(generator=generator)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_and_greedy_answers_equal_the_public_implementation(name, tmp_path):
    assert_parity(make_pair(HYBRIDS[name], tmp_path, remember_longer))


@pytest.mark.parametrize("name", ODD_HYBRIDS)
def test_odd_configurations_equal_the_public_implementation(name, tmp_path):
    assert_parity(make_pair(ODD_HYBRIDS[name], tmp_path, remember_longer))
