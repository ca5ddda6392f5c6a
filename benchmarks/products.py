"""Compare our CPU kernel for matmuls with PyTorch's routines, on weights that are in no cache.

    python -m benchmarks.products
    WEFT_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python -m benchmarks.products

Prints microseconds, and in brackets the time relative to PyTorch's float32, at the shapes of a model with 107M
parameters. The routines alternate in one process. Each goes through its matrices in turn, and by the time it returns to
one of them, close to a gigabyte of others has been read. Figures are medians. The second command restricts all
libraries to an older processor's instructions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.cpu.linear import HAS_BFLOAT16, has_units_for, linear, prepare
from weft.kernels.native import library
from weft.kernels.weight import Weight

SHAPES = ((768, 4096), (2048, 768), (768, 768))
ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 128, 512)
BYTES = 300 << 20
REST_SECONDS = 0.05

Matmul = Callable[[Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    arguments = parser.parse_args()
    if not library.available():
        return 1
    torch.set_num_threads(arguments.threads)
    units = "with" if HAS_BFLOAT16 else "without"
    print(
        f"instructions: {library.instruction_set()}, {units} 16-bit units; {os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
    )
    for inputs, outputs in SHAPES:
        measure(inputs, outputs, arguments)
    return 0


def measure(inputs: int, outputs: int, arguments: argparse.Namespace) -> None:
    count = max(2, BYTES // (inputs * outputs * 4))
    stored = [(torch.randn(outputs, inputs) / inputs**0.5).bfloat16() for _ in range(count)]
    floats = [matrix.float() for matrix in stored]
    forms: dict[str, tuple[torch.dtype, Iterator[Matmul]]] = {
        "PyTorch float32": (torch.float32, cycle([torch_matmul(each) for each in floats])),
        "Weft float32": (torch.float32, cycle([our_matmul(each + 1e-7) for each in floats])),
        "Weft float32 of 16 bits": (torch.float32, cycle([our_matmul(each) for each in floats])),
        "Weft bfloat16": (torch.bfloat16, cycle([our_matmul(each) for each in stored])),
    }
    if has_units_for(stored[0]):
        forms["PyTorch bfloat16"] = (torch.bfloat16, cycle([torch_matmul(each) for each in stored]))
    print(f"\n{inputs} inputs, {outputs} outputs\n| rows | {' | '.join(forms)} |\n|---:|{'---:|' * len(forms)}")
    for rows in arguments.rows:
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(arguments.turns):
            for name, (dtype, matmuls) in forms.items():
                seconds[name].append(timed(torch.randn(rows, inputs).to(dtype), matmuls, max(2, count // rows)))
        medians = {name: median(each) for name, each in seconds.items()}
        base = medians["PyTorch float32"]
        cells = [f"{each * 1e6:.0f} ({each / base:.2f})" for each in medians.values()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def torch_matmul(matrix: Tensor) -> Matmul:
    return lambda x: F.linear(x, matrix)


def our_matmul(matrix: Tensor) -> Matmul:
    weight = prepare(Weight(matrix), twice=True)
    return lambda x: linear(x, weight)


def timed(x: Tensor, matmuls: Iterator[Matmul], count: int) -> float:
    """Return seconds per matmul."""
    # Threads of the other library spin for a while after their last work, and would disturb.
    time.sleep(REST_SECONDS)
    next(matmuls)(x)
    some = list(islice(matmuls, count))
    began = time.perf_counter()
    for matmul in some:
        matmul(x)
    return (time.perf_counter() - began) / len(some)


if __name__ == "__main__":
    sys.exit(main())
