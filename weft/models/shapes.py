"""A model in numbers, from its configuration alone: no weights are created or read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.kernels.choosing import everywhere
from weft.kernels.formats.quantising import AS_STORED, Quantising
from weft.memory.spec import AttentionMemory, Memory
from weft.models.config import Config, checkpoint_config, text_part
from weft.models.held import WeightFacts
from weft.models.inventory import planned_facts, share_of_experts
from weft.models.weights import build, formats_of_dummy


@dataclass(frozen=True, slots=True)
class ModelShape:
    memories: tuple[Memory, ...]
    parameters: int
    active_parameters: int  # used by one token: of the experts, only the chosen ones
    attention_width: int  # query heads times their size, summed over attention layers
    weights: WeightFacts


def shape_of(
    path: Path,
    quantising: Quantising = AS_STORED,
    stated: Mapping[str, Any] | None = None,
    states: str = "float32",
) -> ModelShape:
    """Return the numbers of a model whose plain numbers have 16 bits, or are quantised.

    `stated` is the `quantization_config` of its checkpoint, where that of `path` has none. States have dtype `states`.
    """
    fields = text_part(checkpoint_config(path)) | ({} if stated is None else {"quantization_config": stated})
    model = build(fields, torch.bfloat16, declare=True)
    model.keep(states=states)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    memories = model.memories(everywhere("cpu"))
    sizes_of_heads = sum(memory.head_dim for memory in memories if isinstance(memory, AttentionMemory))
    width = sizes_of_heads * Config(fields).integer("num_attention_heads", default=1)
    weights = planned_facts(model, fields, formats_of_dummy(model, path, fields, quantising))
    return ModelShape(memories, total, total - experts + round(experts * share_of_experts(fields)), width, weights)
