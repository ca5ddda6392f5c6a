"""Compare our CPU kernel for matmuls of few rows with PyTorch's routines, on weights that are in no cache.

    python -m benchmarks.products

Prints microseconds and GB/s of weights for float32 and bfloat16, at the shapes of a model with 107M parameters. The
routines alternate in one process, each over enough matrices that all are read from memory. Figures are medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.cpu.linear import HAS_ONEDNN, pack
from weft.kernels.native import library
from weft.kernels.native.linear import few_rows

SHAPES = ((768, 4096), (2048, 768), (768, 2304), (768, 768))
ROWS = (1, 2, 4, 8, 16)
BYTES = 300 << 20
REST_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    if not library.available():
        return 1
    torch.set_num_threads(arguments.threads)
    print("| dtype | inputs x outputs | rows | routine | µs | GB/s |\n|---|---|---:|---|---:|---:|")
    for dtype in library.DTYPES:
        for inputs, outputs in SHAPES:
            measure(dtype, inputs, outputs, arguments.turns)
    return 0


def measure(dtype: torch.dtype, inputs: int, outputs: int, turns: int) -> None:
    size = inputs * outputs * dtype.itemsize
    weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(max(2, BYTES // size))]
    forms = {"Weft": (few_rows, weights), "PyTorch, as stored": (F.linear, weights)}
    if dtype == torch.float32:
        forms["PyTorch, inputs first"] = (F.linear, [weight.t().contiguous().t() for weight in weights])
    if HAS_ONEDNN:
        forms["oneDNN"] = (onednn, [pack(weight) for weight in weights])
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(turns):
            for name, (product, matrices) in forms.items():
                seconds[name].append(timed(product, x, matrices))
        for name, values in seconds.items():
            rate = size / median(values) / 1e9
            kind = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {inputs} x {outputs} | {rows} | {name} | {median(values) * 1e6:.0f} | {rate:.1f} |")


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def timed(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, matrices: list[Tensor]) -> float:
    # Let the previous routine's threads stop spinning.
    time.sleep(REST_SECONDS)
    product(x, matrices[0])
    begun = time.perf_counter()
    for matrix in matrices:
        product(x, matrix)
    return (time.perf_counter() - begun) / len(matrices)


if __name__ == "__main__":
    sys.exit(main())
