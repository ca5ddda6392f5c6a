"""Experts compared in different company."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.kernels.operations import experts
from weft.kernels.cpu.moe import route_top
from weft.kernels.experts import gated


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_a_token_is_worth_the_same_in_any_company():
    first, second = random(6, 16, 8, seed=1), random(6, 8, 8, seed=2)
    x, logits = random(40, 8, seed=3), random(40, 6, seed=4)
    weights, chosen = route_top(logits, 3)
    together = experts(x, weights, chosen, first, second, gated(F.silu))
    for token in (0, 7, 39):
        part = slice(token, token + 1)
        alone = experts(x[part], weights[part], chosen[part], first, second, gated(F.silu))
        torch.testing.assert_close(alone[0], together[token], rtol=1e-5, atol=1e-6)
