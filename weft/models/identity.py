"""The identity of a loaded model: what the keys, values and states that it computes depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from xxhash import xxh3_128_digest

from weft.kernels.choosing import REVISIONS
from weft.kernels.formats.rounded import FP8, INTEGERS
from weft.memory.identity import Identity, digest
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel, MatrixLayer
from weft.models.sharding import ALONE, Shard

# Raised when exact engines name their cells in another way, so that none of them keeps cells which it cannot find.
EXACT_KEYS = 2
# Raised when rows are rounded to other numbers.
ROUNDINGS = {INTEGERS: 1, FP8: 1}


def identity_of(
    model: CausalModel, config: Mapping[str, Any], spec: MemorySpec, exact: bool = False, shard: Shard = ALONE
) -> Identity:
    """Return the identity of a model whose weights were digested when they were loaded.

    A rank's part of a model has its own: parts with the same weights, such as random ones, are not the same.
    """
    # Room for drafts is in tails, which no file holds.
    layout = repr(replace(spec, draft_room=0)) + (f"\nrank {shard.rank} of {shard.ranks}" if shard.ranks > 1 else "")
    return Identity(
        configuration=digest(json.dumps(config, sort_keys=True, default=str).encode()),
        weights=model.weights_digest,
        layout=digest(layout.encode()),
        revisions=revisions_of(model, exact),
        exact=exact,
    )


def revisions_of(model: CausalModel, exact: bool = False) -> str:
    """Return the numbers of what the code computes: the family's, those of all kernel packages, and of exact keys.

    Of all, not of the chosen ones: packages compute the same by definition, so engines with different ones exchange
    states. A fix in any of them ends that with engines before it.
    """
    parts = {type(model).__name__: model.revision, **REVISIONS} | ({"exact keys": EXACT_KEYS} if exact else {})
    parts |= {f"rows of {kind}": ROUNDINGS[kind] for kind in sorted(rows_in(model))}
    return ", ".join(f"{name} {number}" for name, number in parts.items())


def rows_in(model: CausalModel) -> set[str]:
    """Return what rows are rounded to before they are multiplied with some matrices of a prepared model."""
    layers = [module for module in model.modules() if isinstance(module, MatrixLayer)]
    return {kind for layer in layers for part in layer.stored_parts() if (kind := part.format.rows_in) is not None}


def weights_digest(model: CausalModel) -> bytes:
    """Return a digest of all weights as they were read, before operations put them into a layout of their own.

    Formats are named too: the same bytes may mean other numbers.
    """
    lines = []
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().contiguous().flatten().view(torch.uint8).numpy(force=True)
        lines.append(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + xxh3_128_digest(flat))
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            lines += [f"\n{path} {part.format}".encode() for part in module.stored_parts()]
    return digest(b"".join(lines))
