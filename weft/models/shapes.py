"""A model in numbers, from its configuration alone: no weights are created or read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from weft.kernels.choosing import everywhere
from weft.memory.spec import AttentionMemory, Memory
from weft.models.config import Config, checkpoint_config, text_part
from weft.models.weights import build


@dataclass(frozen=True, slots=True)
class ModelShape:
    memories: tuple[Memory, ...]
    parameters: int
    active_parameters: int  # used by one token: of the experts, only the chosen ones
    attention_width: int  # query heads times their size, summed over attention layers


def shape_of(path: Path) -> ModelShape:
    fields = text_part(checkpoint_config(path))
    model = build(fields, torch.bfloat16, "meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    config = Config(fields)
    chosen = config.integer("num_experts_per_tok", "experts_per_token", "num_experts_per_token", default=1)
    among = config.integer("num_experts", "num_local_experts", "n_routed_experts", default=1)
    total = sum(sizes.values())
    memories = model.memories(everywhere("cpu"))
    sizes_of_heads = sum(memory.head_dim for memory in memories if isinstance(memory, AttentionMemory))
    width = sizes_of_heads * config.integer("num_attention_heads", default=1)
    return ModelShape(memories, total, total - experts + experts * chosen // among, width)
