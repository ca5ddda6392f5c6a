"""Load one rank's part of a model. Its processes start sooner without what only the first rank needs."""

from __future__ import annotations

from pathlib import Path

import torch

from weft import builtin
from weft.base.errors import OptionError
from weft.base.options import Options
from weft.device.devices import choose_device, free_bytes, gpu_count, use_gpu
from weft.kernels.choosing import choose
from weft.kernels.formats.quantising import Quantising
from weft.memory.spec import MemorySpec
from weft.models.dtypes import choose_dtype
from weft.models.finding import find_checkpoint
from weft.models.identity import identity_of
from weft.models.sharding import Shard
from weft.models.weights import load_model
from weft.runner.ranks.part import LoadedPart, rank_threads


def load_part(options: Options, rank: int, ranks: int, identify: bool = False) -> LoadedPart:
    """Load the part of a rank other than the first, which loads its own with `load`."""
    folder = find_checkpoint(builtin.place_of(options.model), options.weights != "dummy")
    dtype, device = choose_dtype(options.dtype, folder), choose_device(options.device)
    use_share_of(rank, ranks, device, options.threads)
    shard = shard_of(options, rank)
    spare = spare_bytes(ranks)
    identify = identify or options.disk is not None
    weights = (options.weights, options.seed, spare)
    model, config = load_model(
        folder,
        dtype,
        device,
        False,
        *weights,
        shard=shard,
        identify=identify,
        quantising=quantising_of(options),
        activations=options.activations,
    )
    model.keep(options.kv_dtype, options.state_dtype)
    operations = choose(device, dtype, model.memories, activations=options.activations).operations
    found = identity_of(model, config, MemorySpec(model.memories(operations)), shard=shard) if identify else None
    disk = None if options.disk is None else Path(options.disk)
    return LoadedPart(model, operations, device, rank, ranks, found, disk)


def spare_bytes(ranks: int) -> int:
    """Return the host memory that a rank may use for second copies of its weights."""
    return free_bytes() // ranks


def use_share_of(rank: int, ranks: int, device: str, threads: int) -> None:
    """Use a rank's own GPU, or its share of the cores: threads beyond it would wait for those of other ranks.

    With several GPUs it was never tested.
    """
    if device == "cpu":
        torch.set_num_threads(rank_threads(ranks, threads))
        return
    if ranks > gpu_count():
        raise OptionError(f"tensor_parallel is {ranks} but needs a GPU for each rank, and there are {gpu_count()}")
    use_gpu(rank)


def shard_of(options: Options, rank: int) -> Shard:
    """Return a rank's part of the model."""
    return Shard(rank, options.tensor_parallel, options.expert_parallel)


def quantising_of(options: Options) -> Quantising:
    """Return which matrices an engine with these options quantises."""
    return Quantising(options.quantize, options.quantize_head)
