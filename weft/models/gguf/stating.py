"""What a GGUF file would state of a model, compared with the checkpoint's configuration before the file is written.

Both are built without memory, and every value that their layers compute with must be equal. So a field that no key of
the file stands for is refused, not lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.base.gguf.header import Header, StoredTensor
from weft.base.gguf.writing import NewTensor
from weft.models.gguf.configuration import config_of
from weft.models.gguf.frequencies import STRETCHED
from weft.models.layers.moe import Route
from weft.models.weights import build

SIMPLE = (bool, int, float, str, type(None), torch.dtype)


def check_stated(
    config: Mapping[str, Any], metadata: Mapping[str, Any], tensors: Sequence[NewTensor], target: Path
) -> None:
    """Raise unless the metadata describe the model of the configuration."""
    places = {each.name: StoredTensor(target, each.name, each.type, each.shape, 0, each.bytes) for each in tensors}
    factors = places.pop("rope_freqs.weight", None)
    stated = config_of(Header(target, metadata, places, 0))
    if factors is not None:
        # Readers know these by their factors, which are not written yet.
        scaled = config.get("rope_parameters") or config.get("rope_scaling") or {}
        stated["rope_scaling"] = {"rope_type": "llama3", **STRETCHED, "factor": scaled["factor"]}
    expected, found = (dict(values_of(build(each, torch.bfloat16, declare=True))) for each in (config, stated))
    for place in sorted({*expected, *found}):
        own, other = expected.get(place), found.get(place)
        if own != other:
            raise ModelError(
                f"a GGUF file of {metadata['general.architecture']} cannot state {place}: it is {own!r:.80}, and "
                f"readers of the file would take {other!r:.80}"
            )


def values_of(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Return what modules compute with, by place: their fields, derived tensors, and shapes of those in checkpoints."""
    stored = model.state_dict()
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield from plain(f"{place}.{name}", value)
        for name, buffer in module.named_buffers(recurse=False):
            if f"{place}.{name}" not in stored:
                yield f"{place}.{name}", buffer.numpy().tobytes().hex()
    for name, tensor in stored.items():
        yield name, tuple(tensor.shape)


def plain(place: str, value: Any) -> Iterator[tuple[str, object]]:
    """Return the simple values in a value. Objects that are none of these say nothing of the model."""
    if isinstance(value, SIMPLE):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from plain(f"{place}.{number}", each)
    elif isinstance(value, (Mapping, Route)):
        for name, each in (value if isinstance(value, Mapping) else vars(value)).items():
            yield from plain(f"{place}.{name}", each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from plain(f"{place}.{field.name}", getattr(value, field.name))
    elif isinstance(value, partial):
        yield from plain(place, (value.func, value.args, value.keywords))
    elif callable(value) and not isinstance(value, (nn.Module, Tensor)):
        yield place, getattr(value, "__qualname__", type(value).__name__)
