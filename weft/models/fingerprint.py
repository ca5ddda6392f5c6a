"""The fingerprint of a model: files with another one hold keys, values and states of another model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from xxhash import xxh3_128_digest

from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.models.sharding import ALONE, Shard


def fingerprint(model: CausalModel, config: Mapping[str, Any], spec: MemorySpec, shard: Shard = ALONE) -> bytes:
    """Return a digest of everything that pages and states depend on: configuration, weights, dtypes, cell, layout.

    A rank's part of a model has its own: parts with the same weights, such as random ones, are not the same.
    """
    digest = sha256(b"weft resume points 1\n")
    if shard.ranks > 1:
        digest.update(f"rank {shard.rank} of {shard.ranks}\n".encode())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    # Room for drafts is in tails, which no file holds.
    digest.update(repr(replace(spec, draft_room=0)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().contiguous().flatten().view(torch.uint8).numpy(force=True)
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + xxh3_128_digest(flat))
    return digest.digest()
