"""How much of a GPU each test may take, so that PROCESSES of them fit beside each other on an H200.

A process holds one model at a time (`cuda_engines.held`). The tests of a published shape share a process, so its
weights are never on the GPU twice; those of a tiny model are cut into batches (`Batches`), since they are many and
their weights nothing. So what a process takes is the sum for its test:

    a published shape   weights of its few layers (0.6 to 9.6 GiB) + ARENA 2 + WORK 2 + CONTEXT 0.6 GiB
    a tiny model        TINY 1 (weights below 1 MiB, an arena of 64 MiB, work) + CONTEXT
    a kernel            KERNELS 8 (the largest: experts of gpt-oss-20b, 1.6 GiB and as much again while drawn) + CONTEXT

`claim` makes the sum a limit before each test: a test that takes more, as one with `memory="auto"` would, fails by
itself instead of taking the memory of others. `tests/project/test_gpu_memory.py` adds the sums up.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

GIB = 1 << 30
PROCESSES = 12
# Of an H200, as CUDA reports it: 141 GB less what the driver keeps.
DEVICE_BYTES = 139 * GIB
# Of a process before it has allocated anything: CUDA's own, and the code of some hundred kernels.
CONTEXT_BYTES = 6 * GIB // 10
ARENA_BYTES = 2 * GIB
# The largest steps (584 tokens, scores over 262,144 tokens), recorded steps, libraries' workspaces, copies of states.
WORK_BYTES = 2 * GIB
TINY_BYTES = 2 * GIB
KERNEL_BYTES = 8 * GIB


# At the end of a parameter's id, behind the name of its group.
GROUP = "@gpu"
# Tests of a tiny model that one process runs one after the other: most models have nine.
BATCH = 5
# A mark alone leaves out the tests that are slow or need a GPU too.
ALONE = {
    "gpu": "gpu and not slow",
    "slow": "slow and not gpu",
    "families": "families and not slow and not gpu",
    "kernels": "kernels and not slow and not gpu",
    "thorough": "thorough and not slow and not gpu",
    "families or kernels or thorough": "(families or kernels or thorough) and not slow and not gpu",
}


def group_of(nodeid: str) -> str | None:
    """The model that a test needs, if it needs one. (A mark does not reach xdist's scheduler from pytest 9 on.)

    >>> group_of("tests/test_x.py::test_y[tiny lfm2 float32@gpu-cache on]"), group_of("tests/test_x.py::test_z[1-2]")
    ('tiny lfm2 float32', None)
    """
    found = re.search(rf"\[(.*){GROUP}", nodeid)
    return found[1] if found else None


def completed(markexpr: str) -> str:
    """Return what `-m` means: `pytest -m gpu` takes minutes, `pytest -m slow` needs no GPU."""
    return ALONE.get(markexpr, markexpr)


class Batches:
    """Cuts the tests of each tiny model into batches, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._tests: Counter[str] = Counter()

    def of(self, nodeid: str) -> str:
        """Return the batch of a test, the same every time; a test that needs no model is one of its own."""
        if nodeid not in self._found:
            self._found[nodeid] = self._next(group_of(nodeid)) or nodeid
        return self._found[nodeid]

    def _next(self, group: str | None) -> str | None:
        if group is None or not group.startswith("tiny "):
            return group
        self._tests[group] += 1
        return f"{group}, batch {(self._tests[group] - 1) // BATCH}"


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler of xdist that gives a batch as a whole to the next process that is free."""
    from xdist.scheduler import LoadScopeScheduling

    batches = Batches()

    class ByBatch(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return batches.of(nodeid)

    return ByBatch(config, log)


def allocation_of(group: str | None) -> int:
    """Bytes that PyTorch may allocate for a test of this group: None, "tiny ..." or the name of a configuration."""
    if group is None:
        return KERNEL_BYTES
    return TINY_BYTES if group.startswith("tiny ") else weight_bytes(group) + ARENA_BYTES + WORK_BYTES


@cache
def weight_bytes(name: str) -> int:
    """Of the few layers of a packaged configuration, in bfloat16."""
    import torch

    from tests.support.models.cuda_engines import few_layers, packaged
    from weft.models.config import text_part
    from weft.models.weights import build

    model = build(text_part(few_layers(packaged(name))), torch.bfloat16, "meta")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def claim(item: pytest.Item) -> None:
    """Release what tests of other models have left, and limit the process to what this test may allocate."""
    import torch

    if not torch.cuda.is_available():
        return
    group = group_of(item.nodeid)
    from tests.support.models import cuda_engines

    cuda_engines.release(keep=group)
    if group is not None and not group.startswith("tiny "):
        # What a test of the same model has left needs nearly as much.
        cuda_engines.free()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, allocation_of(group) / total))
