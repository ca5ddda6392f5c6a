"""Random weights from a configuration alone, scaled so that every layer, state and position matters.

Matrices have a standard deviation of 1 / sqrt(inputs). A module whose parameters have another meaning (decays, time
steps, norms per head, embeddings) defines `initialise(generator)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor, nn

from weft.kernels.formats.stored import Format
from weft.models.model import CausalModel, Source, sources
from weft.models.storing import Declared, declared_matrices, encoded, materialise, storage_of


def fill_dummy(
    model: CausalModel, seed: int, format_of: Callable[[str, int, int], Format] | None, device: torch.device | str
) -> None:
    """Fill a model whose matrices are only declared, in the formats of a checkpoint where they are quantised."""
    matrices = declared_matrices(model)
    by_owner: dict[int, list[Declared]] = defaultdict(list)
    wanted: dict[int, list[Source]] = defaultdict(list)
    for matrix in matrices.values():
        by_owner[id(matrix.owner)].append(matrix)
    for source in sources(model):
        wanted[storage_of(source.target)].append(source)

    def before(module: nn.Module) -> None:
        for matrix in by_owner[id(module)]:
            materialise(matrix, device)

    def after(module: nn.Module) -> None:
        for matrix in by_owner[id(module)] if format_of is not None else ():
            assert format_of is not None
            [stored] = matrix.owner.parts_of(matrix.name)
            parts = encoded(matrix, stored.tensors[0], wanted[storage_of(matrix.parameter)], format_of)
            matrix.owner.store(matrix.name, parts)

    fill_randomly(model, seed, before, after)


def nothing(module: nn.Module) -> None:
    pass


def fill_randomly(
    model: nn.Module,
    seed: int,
    before: Callable[[nn.Module], None] = nothing,
    after: Callable[[nn.Module], None] = nothing,
) -> None:
    """Fill every module from its own generator, so that a layer's weights do not depend on its neighbours.

    `before` and `after` are called with each module.
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
            else:
                for name, tensor in own.items():
                    fill(name, tensor, generator)
            after(module)


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.ndim >= 2:
        tensor.normal_(std=1 / math.sqrt(tensor.shape[-1]), generator=generator)
    elif name == "weight":
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.1, generator=generator)
