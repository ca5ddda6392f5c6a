"""Features that do not work together, and why: one table for the options, `weft doctor` and docs/operate.md."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from weft.base.errors import InvalidOption

CPU, GPU = "on a CPU", "on a GPU"


@dataclass(frozen=True, slots=True)
class RefusedFeatures:
    """Features that exclude each other. `option` is the one that must change, and `demand` says how."""

    features: tuple[str, ...]
    option: str
    demand: str
    reason: str


NOT_OVER_RANKS = "it is not supported for a model cut over ranks"
NEEDS_CACHE = "it keeps what the cache evicts"
OF_ONE_RANK = "each rank has a part of every unit"
REFUSED = (
    RefusedFeatures(
        ("ranks", "exact"), "tensor_parallel", "must be 1 with exact", "sums over ranks have no canonical form"
    ),
    RefusedFeatures(("ranks", "MTP head"), "tensor_parallel", "must be 1 with draft mtp", NOT_OVER_RANKS),
    RefusedFeatures(("ranks", "draft model"), "tensor_parallel", "must be 1 with draft MODEL", NOT_OVER_RANKS),
    RefusedFeatures(
        ("ranks", "remote store"), "tensor_parallel", "must be 1 with remote", "an object is a unit of all ranks"
    ),
    RefusedFeatures(
        ("ranks", "prompts in files"),
        "tensor_parallel",
        "must be 1 with prefix_key and trusted_prefix_keys",
        OF_ONE_RANK,
    ),
    RefusedFeatures(
        ("exact", "MTP head", GPU),
        "draft",
        "must be suffix or off with exact on a GPU",
        "exact steps with drafts are not recorded, and do not read drafts on the device",
    ),
    RefusedFeatures(
        ("exact", "draft model", GPU),
        "draft",
        "must be suffix or off with exact on a GPU",
        "exact steps with drafts are not recorded",
    ),
    RefusedFeatures(
        ("exact", "FP8 activations", GPU),
        "activations",
        "must be auto or wide with exact on a GPU",
        "sums of FP8 products have no canonical order there",
    ),
    RefusedFeatures(("whole experts", GPU), "expert_parallel", "needs CPUs", "on GPUs experts are cut by channels"),
    RefusedFeatures(
        ("small states", GPU),
        "state_dtype",
        "must be float32 on a GPU",
        "its kernels were not tested there at the sizes of models",
    ),
    RefusedFeatures(
        ("host memory", CPU), "host_memory", "needs a GPU", "on a CPU all memory is host memory; raise --memory"
    ),
    RefusedFeatures(("host memory", "no cache"), "host_memory", "needs the cache; do not pass --no-cache", NEEDS_CACHE),
    RefusedFeatures(("file", "no cache"), "disk", "needs the cache; do not pass --no-cache", NEEDS_CACHE),
    RefusedFeatures(("remote store", "no cache"), "remote", "needs the cache; do not pass --no-cache", NEEDS_CACHE),
    RefusedFeatures(
        ("prompts in files", "no cache"),
        "cache",
        "must be on with prefix_key and trusted_prefix_keys",
        "they are cached",
    ),
)


def refuse(features: Set[str]) -> None:
    """Raise if some of these features exclude each other."""
    for each in REFUSED:
        if features >= {*each.features}:
            raise InvalidOption(each.option, f"{each.demand}: {each.reason}")


def refused_with(features: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield what an engine with these features, on any device, cannot have besides, and the reason.

    >>> [name for name, _ in refused_with({"exact"})]
    ['ranks', 'MTP head on a GPU', 'draft model on a GPU', 'FP8 activations on a GPU']
    """
    for each in REFUSED:
        missing = [name for name in each.features if name not in features]
        others = [name for name in missing if name not in (CPU, GPU)]
        if len(others) == 1 and len(missing) < len(each.features):
            yield " ".join(missing), each.reason


def table() -> list[str]:
    """Return the table as Markdown."""
    rows = [(" + ".join(each.features), f"`{each.option}` {each.demand}", each.reason) for each in REFUSED]
    return [f"| {' | '.join(row)} |" for row in (("together", "answer", "reason"), ("---", "---", "---"), *rows)]
