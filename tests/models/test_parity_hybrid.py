"""Hybrid families equal their public implementation."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.hybrid_models import HYBRIDS, NEMOTRON_H, ODD_HYBRIDS
from tests.support.models.oracle import TOLERANCE, DirectRunner, Oracle, assert_parity, make_pair, random_tokens
from weft.device.store import RecurrentView


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


def test_nemotron_h_honours_the_limits_of_its_time_step(tmp_path):
    def limit(oracle: Oracle) -> None:
        remember_longer(oracle)
        for module in oracle.model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.03, 0.5)

    assert_parity(make_pair(NEMOTRON_H.variant(published={"time_step_limit": [0.03, 0.5]}), tmp_path, limit))


@pytest.mark.parametrize("part", ["state", "tail"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_comparison_would_show_a_lost_memory(name, part, tmp_path):
    pair = make_pair(HYBRIDS[name], tmp_path, remember_longer)
    prompt = random_tokens(150, seed=4)
    runner = DirectRunner(pair.model)
    sequence = runner.open(prompt)
    # A convolution's window is taken from the state only at a cell's beginning.
    runner.step([(sequence, 128 if part == "state" else 140)])
    index = sequence.slot if part == "state" else sequence.tail
    for view in runner.store.views:
        if isinstance(view, RecurrentView):
            for tensor in getattr(view, part).values():
                tensor[index].zero_()
    while sequence.computed < len(prompt):
        runner.step([(sequence, 1)])
    assert pair.difference(prompt, sequence.all_logits) > 10 * TOLERANCE
