"""Replicas on one machine: an engine process each, with its own GPU or its own share of the cores and the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.base.cores import available_cores, core_numbers, usable_cores
from weft.base.errors import InvalidOption
from weft.base.options import Options

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Replica:
    """What one of several engines of a machine gets: options, cores (empty: all), environment variables."""

    options: Options
    cores: tuple[int, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def visible_gpus(folder: Path = DEVICES) -> list[str]:
    """Return the GPUs that a process may use, as CUDA names them, without loading CUDA."""
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    found = [path.name.removeprefix("nvidia") for path in folder.glob("nvidia[0-9]*")]
    return [str(place) for place, name in enumerate(found) if name.isdigit()]


def divide(
    options: Options,
    count: int,
    gpus: Callable[[], list[str]] = visible_gpus,
    cores: Callable[[], list[int]] = core_numbers,
    usable: Callable[[], int] = usable_cores,
) -> list[Replica]:
    """Return what each of `count` replicas gets."""
    found = [] if options.device == "cpu" else gpus()
    ranks = options.tensor_parallel
    if found:
        if count * ranks > len(found):
            each = "" if ranks == 1 else f" of {ranks} GPUs each"
            raise InvalidOption(
                "replicas",
                f"is {count}{each} but {len(found)} GPUs are visible; pass at most {len(found) // ranks}",
            )
        shares = [",".join(found[place * ranks : (place + 1) * ranks]) for place in range(count)]
        return [Replica(_own(options, i, count, gpu=True), variables=((VISIBLE, shares[i]),)) for i in range(count)]
    most = usable()
    if count > most:
        raise InvalidOption("replicas", f"is {count} but {most} cores are usable; pass at most {most}")
    numbers = cores()
    each_has = len(numbers) // count
    # `threads` are those of each rank.
    threads = max(1, min(most // count, available_cores()) // ranks)
    own = replace(options, threads=options.threads or threads)
    return [
        Replica(_own(own, place, count), tuple(numbers[place * each_has : (place + 1) * each_has]))
        for place in range(count)
    ]


def _own(options: Options, place: int, count: int, gpu: bool = False) -> Options:
    """Return the options of one replica: its share of sizes that are derived from the machine, its own file and seed.

    The memory of its own GPU is not shared. With one seed, replicas would draw the same numbers for different answers
    to one prompt. Dummy weights are drawn from the seed too, and must be the same.
    """
    changes: dict[str, object] = {"seed": options.seed + (place if options.weights == "checkpoint" else 0)}
    for name in ("host_memory",) if gpu else ("memory", "host_memory"):
        if getattr(options, name) == "auto":
            changes[name] = f"auto/{count}"
    if options.disk is not None:
        changes["disk"] = f"{options.disk}.{place}"
    return replace(options, **changes)  # type: ignore[arg-type]
