"""Compilation of kernels before their first launch, in parallel.

    with compiling_ahead():
        step()          # launches are collected, nothing is started

Compiled one by one, at their first launches, the kernels of a model take most of a first start. Inside this block every
launch becomes a job for a pool of threads: Triton's passes and its assembler run without the interpreter lock. The
compiled kernels are entered where Triton looks for them, under the keys that it computed for these very launches, so
the first real launch of the same arguments finds its kernel. A kernel that fails to compile fails again when it is
launched, and is reported there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from weft.kernels.cuda.launch.launching import Kernel, collecting

log = logging.getLogger("weft")

# Beyond this number the Python part of compiling, which holds the interpreter lock, is the limit.
MOST_THREADS = 16
ALLOCATIONS = ("aten::empty", "aten::new_empty")


class ZeroedMemory(TorchDispatchMode):
    """Fills what PyTorch allocates with zeros.

    Kernels that are not started write nothing, and operators of PyTorch may use their results as indices: a zero is
    valid everywhere.
    """

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        made = operator(*arguments, **(named or {}))
        return made.zero_() if isinstance(made, Tensor) and operator._schema.name.startswith(ALLOCATIONS) else made


class Collected:
    """Launches that were collected, each distinct one once."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def __call__(
        self, kernel: Kernel, key: tuple[Any, ...], grid: Any, arguments: list[Any], settings: dict[str, Any]
    ) -> None:
        # A launch like an earlier one costs Triton more to look up than the rest of the step.
        if (id(kernel), key) not in self.seen:
            self.seen.add((id(kernel), key))
            JITFunction.run(kernel, *arguments, grid=grid, warmup=True, **settings)


@contextmanager
def compiling_ahead(progress: bool = False, threads: int | None = None) -> Iterator[None]:
    """Collect all launches inside, without starting them; compile them in threads; return when all are compiled."""
    assert collecting.by is None, "kernels are already being collected"
    begun, remembering = time.monotonic(), Kernel.remembering
    with ThreadPoolExecutor(threads or pool_size(), "weft-compile") as pool:
        compilation = AsyncCompileMode(pool, ignore_errors=True)
        with compilation:
            # Threads that launch meanwhile do so without the cache of launches, so that none is lost.
            collecting.by, Kernel.remembering = Collected(), False
            try:
                with ZeroedMemory():
                    yield
            finally:
                collecting.by, Kernel.remembering = None, remembering
            _wait(compilation, progress)
    if compilation.raw_futures:
        log.info("%d kernels are ready after %.1f s", len(compilation.raw_futures), time.monotonic() - begun)


def pool_size() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


def _wait(compilation: AsyncCompileMode, progress: bool) -> None:
    jobs = compilation.raw_futures
    left = [job for job in jobs if not job.done()]
    if left:
        log.info("compiling %d kernels for this GPU; later starts find them in Triton's cache", len(jobs))
    # `None`: no bar unless standard error is a terminal.
    disable = None if progress else True
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(left), desc="compiling kernels", disable=disable, delay=1)
    with bar:
        for _ in as_completed(left):
            bar.update()
