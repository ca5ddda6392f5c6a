"""How several models share a machine's memory: what each gets, and what it costs of all there is.

The budget is `--models-memory`. A model costs its weights, its process, and its KV cache and states. Their size is
its own `memory`, or what is left of an equal share of the budget, up to 4 GiB; where that is less than 256 MiB, half of
what the whole budget leaves beside the weights. So all models are loaded at once wherever an equal share has room for
each.

On a CPU the budget is 0.8 of the memory that is free at the start, if none is given. On a GPU nothing is known of its
memory here: without a budget one model is loaded at a time, and takes what one alone takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weft import builtin
from weft.base.errors import ModelError, OptionError
from weft.base.free_memory import free_memory
from weft.base.hub.short_names import hub_id_of
from weft.base.options import AUTO_MEMORY_BYTES, PAGE_BYTES, Options, auto_share, draft_of, memory_bytes
from weft.models.finding import PATTERNS, local_checkpoint

# Of an engine's process besides: libraries, and on a GPU the working memory of its steps.
PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
LEAST_SHARE_BYTES = 256 << 20
# Of the memory that is free at the start.
AUTO_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A model's options with its share of the memory, and what it costs of the budget."""

    options: Options
    cost: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Shares:
    """`about` says how the memory is shared, for the first lines."""

    budget: int
    models: Mapping[str, ModelShare]
    about: str


def shares_of(
    models: Mapping[str, Options], given: str, gpu: Callable[[], bool], free: Callable[[], int] = free_memory
) -> Shares:
    """Return what each model gets of the memory that is `given`. Raises if one does not fit even alone."""
    weights = {name: weights_of(name, options) for name, options in models.items()}
    budget = memory_bytes(given, "models_memory")
    on_gpu = any(options.device != "cpu" for options in models.values()) and gpu()
    if budget is None and on_gpu:
        found = {name: ModelShare(options, 1, weights[name]) for name, options in models.items()}
        return Shares(1, found, "the whole GPU for one model at a time; --models-memory keeps several loaded")
    if budget is None:
        budget = int(AUTO_SHARE * free()) // (auto_share(given) or 1)
    process = PROCESS_BYTES["cuda" if on_gpu else "cpu"]
    found = {name: share_of(name, each, weights[name], process, budget, len(models)) for name, each in models.items()}
    return Shares(budget, found, f"{gib(budget)} for {', '.join(f'{n} {gib(each.cost)}' for n, each in found.items())}")


def share_of(name: str, options: Options, weights: int, process: int, budget: int, count: int) -> ModelShare:
    """Return what one of `count` models gets."""
    ranks, given = options.tensor_parallel, memory_bytes(options.memory)
    fixed = weights + process * ranks
    memory = auto_memory(fixed, budget, count) // ranks if given is None else given
    cost = fixed + max(0, memory) * ranks
    if memory < PAGE_BYTES or cost > budget:
        raise OptionError(
            f"model {name} needs {gib(cost)} ({gib(weights)} of weights, {gib(max(0, memory) * ranks)} of KV cache and "
            f"states, {gib(process * ranks)} for its process) but all models may use {gib(budget)}; give it less with "
            "memory=, raise --models-memory, or leave the model out"
        )
    return ModelShare(replace(options, memory=memory), cost, weights)


def auto_memory(fixed: int, budget: int, count: int) -> int:
    """Return the KV cache and states of a model that names no size.

    >>> auto_memory(1 << 30, 10 << 30, 2) >> 20, auto_memory(5 << 30, 10 << 30, 2) >> 20
    (4096, 2560)
    """
    left = budget // count - fixed
    memory = left if left >= LEAST_SHARE_BYTES else (budget - fixed) // 2
    return min(AUTO_MEMORY_BYTES, memory) // PAGE_BYTES * PAGE_BYTES


def weights_of(name: str, options: Options) -> int:
    """Return the bytes of the weight files of a model and its drafter. Raises if one is not on this machine."""
    drafter = [options.draft] if draft_of(options) == "model" else []
    return sum(bytes_of(name, each, options) for each in (options.model, *drafter))


def bytes_of(name: str, model: str | None, options: Options) -> int:
    with_weights = options.weights != "dummy"
    try:
        place = local_checkpoint(builtin.place_of(model), with_weights)
    except ModelError as error:
        raise OptionError(f"model {name}: {error}") from None
    if place is None:
        place = downloaded(name, str(model))
    files = [place] if place.is_file() else [*place.glob("*.safetensors")]
    return sum(each.stat().st_size for each in files) if with_weights else 0


def downloaded(name: str, model: str) -> Path:
    """Return the folder of a hub id that was downloaded before. A model is not downloaded for a request."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id_of(model), allow_patterns=PATTERNS, local_files_only=True))
    except (OSError, ValueError):
        raise OptionError(
            f"model {name}: {model} is not on this machine; run weft pull {model} first, or pass the place that it "
            "prints"
        ) from None


def gib(size: int) -> str:
    """
    >>> gib(3 << 29), gib(1 << 20)
    ('1.50 GiB', '0.00 GiB')
    """
    return f"{size / 2**30:.2f} GiB"
