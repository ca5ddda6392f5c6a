"""Launches of latent attention's matmuls by head, for the compiler."""

from __future__ import annotations

import torch

from weft.kernels.cuda.latent_attention.exact import multiply_by_head


def launch_by_head() -> None:
    """What `tests/kernels/cuda/test_exact_cuda.py` compiles."""
    matrices = torch.empty(4, 128, 512, dtype=torch.bfloat16)
    for tokens in (1, 70):
        multiply_by_head(torch.empty(tokens, 4, 512, dtype=torch.bfloat16), matrices)
        multiply_by_head(torch.empty(tokens, 4, 128, dtype=torch.bfloat16), matrices.transpose(1, 2))
