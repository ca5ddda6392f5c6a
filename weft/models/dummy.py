"""Random weights from a configuration alone, scaled so that every layer, state and position matters.

Matrices have a standard deviation of 1 / sqrt(inputs). A module whose parameters have another meaning (decays, time
steps, norms per head, embeddings) defines `initialise(generator)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from weft.models.storing import Declared, declared_matrices, materialise


def fill_dummy(model: nn.Module, seed: int, config: Mapping[str, Any], device: torch.device | str) -> None:
    """Fill a model whose matrices are only declared."""
    by_owner: dict[int, list[Declared]] = defaultdict(list)
    for matrix in declared_matrices(model).values():
        by_owner[id(matrix.owner)].append(matrix)

    def before(module: nn.Module) -> None:
        for matrix in by_owner[id(module)]:
            materialise(matrix, device)

    fill_randomly(model, seed, before)


def fill_randomly(model: nn.Module, seed: int, before: Callable[[nn.Module], None] = lambda module: None) -> None:
    """Fill every module from its own generator, so that a layer's weights do not depend on its neighbours.

    `before` is called with each module first.
    """
    with torch.no_grad():
        for path, module in model.named_modules():
            before(module)
            parameters = dict(module.named_parameters(recurse=False))
            buffers = {
                n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set
            }
            own = {**parameters, **buffers}
            if not own:
                continue
            device = next(iter(own.values())).device
            generator = torch.Generator(device).manual_seed(crc32(f"{seed} {path}".encode()))
            initialise = getattr(module, "initialise", None)
            if initialise is not None:
                initialise(generator)
                continue
            for name, tensor in own.items():
                fill(name, tensor, generator)


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.ndim >= 2:
        tensor.normal_(std=1 / math.sqrt(tensor.shape[-1]), generator=generator)
    elif name == "weight":
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.1, generator=generator)
