"""Time the attention of decodes on a CPU by the dtype of pages, with C++ kernels and with PyTorch's.

    python -m benchmarks.pages_cpu
    python -m benchmarks.pages_cpu --dtype float32 --contexts 8000 --rows 1 8 --threads 1

Each layer of a model has pages of its own, so a step reads them from memory as far as a model's would. A time is the
median over some steps of all layers, per layer: norms, rotation, matmuls and everything else of a layer are not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tests.support.kernels.operations import CPU, NATIVE, attention
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView, Store
from weft.kernels.interface import Batch
from weft.kernels.pages import put
from weft.memory.spec import CODES, AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

STEPS = 9
# Queries, keys and values of a step.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


SHAPES = {"weft-small": Shape(6, 2, 64, 3), "SmolLM2-135M": Shape(9, 3, 64, 30)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages_cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="dtype of the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, {arguments.dtype}; µs of a layer")
    for name in arguments.shapes:
        for rows in arguments.rows:
            for context in arguments.contexts:
                for pages in (arguments.dtype, *CODES):
                    times = measure(SHAPES[name], rows, context, arguments.dtype, pages)
                    print(f"{name:14} {rows:2} rows after {context:5}: pages in {pages:8} " + times, flush=True)
    return 0


def measure(shape: Shape, rows: int, context: int, dtype: str, pages: str) -> str:
    memory = AttentionMemory(shape.kv_heads, shape.head_dim, pages)
    spec = MemorySpec((memory,) * shape.layers)
    cells = context // spec.cell + 1
    store = Store(spec, rows * cells * spec.page_bytes + (1 << 20))
    generator, kind = torch.Generator().manual_seed(1), getattr(torch, dtype)

    def drawn(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=generator).to(kind)

    tokens = torch.arange(rows * cells * spec.cell)
    keys, values = (drawn(len(tokens), shape.kv_heads) for _ in range(2))
    views = [view for view in store.views if isinstance(view, AttentionView)]
    for view in views:
        put(view, (tokens // spec.cell, tokens % spec.cell), keys, values)
    lists = torch.randperm(rows * cells, generator=generator).view(rows, cells).tolist()
    plan = make_plan([Row(context, context + 1, pages=line) for line in lists])
    inputs = drawn(rows, shape.heads), drawn(rows, shape.kv_heads), drawn(rows, shape.kv_heads)
    found = []
    for operations in (NATIVE, CPU):
        batch = build_batch(plan, spec, torch.zeros(rows, dtype=torch.int64), "cpu", operations)
        found.append(seconds_of(partial(attend_all, inputs, batch, views)) / shape.layers * 1e6)
    return f"C++ {found[0]:7.0f}, PyTorch {found[1]:7.0f}"


def attend_all(inputs: Inputs, batch: Batch, views: list[AttentionView]) -> None:
    for view in views:
        attention(*inputs, batch, view, 0.125)


def seconds_of(step: Callable[[], None]) -> float:
    """Return the median time of some steps after the first."""
    times = []
    for _ in range(STEPS + 1):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


if __name__ == "__main__":
    raise SystemExit(main())
