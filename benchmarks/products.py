"""Compare our CPU kernel for matmuls with PyTorch's routines, on weights that are in no cache.

    python -m benchmarks.products
    python -m benchmarks.products --isa avx2 avx512 native --rows 1 16 256

Prints microseconds, and in brackets the time relative to PyTorch's float32, at the shapes of a model with 107M
parameters; at the end, for each instruction set and number of rows, the mean and worst ratio of bfloat16 to the faster
of the two kinds of float32. `--isa` restricts all libraries, in a process of its own for each. The routines alternate
in one process. Each goes through its matrices in turn, and by the time it returns to one of them, close to a gigabyte
of others has been read. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.instructions import RESTRICTIONS, flags, restricted
from benchmarks.peers.table import machine
from weft.kernels.cpu.linear import HAS_BFLOAT16, has_units_for, linear, prepare
from weft.kernels.native import library
from weft.kernels.native.compiling import instruction_set
from weft.kernels.weight import Weight

SHAPES = ((768, 4096), (2048, 768), (768, 768))
ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 128, 512)
BYTES = 300 << 20
REST_SECONDS = 0.05
RATIOS = "ratios: "

Matmul = Callable[[Tensor], Tensor]
# Of bfloat16 to float32, by number of rows, one for each shape.
Ratios = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isa", nargs="*", choices=RESTRICTIONS, default=["native"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=1e9, help="repeat at most this long, for each instruction set")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        return measure_all(arguments)
    print(f"{machine(arguments.threads)}\n{flags()}", flush=True)
    found = {isa: run(isa, sys.argv[1:]) for isa in arguments.isa}
    print(table(found))
    return 0


def run(isa: str, options: list[str]) -> Ratios:
    """Measure with one instruction set, in a process that is restricted to it."""
    command = [sys.executable, "-m", "benchmarks.products", *options, "--here"]
    ratios: Ratios = {}
    with subprocess.Popen(command, env=restricted(isa), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RATIOS):
                ratios = json.loads(line.removeprefix(RATIOS))
            else:
                print(line, end="", flush=True)
    return ratios


def table(found: dict[str, Ratios]) -> str:
    """Return the mean and worst ratio of bfloat16 to float32.

    >>> print(table({"avx2": {"1": [0.5, 0.7]}}))
    <BLANKLINE>
    bfloat16 over the faster float32, mean and worst of the shapes
    | rows | avx2 |
    |---:|---:|
    | 1 | 0.60, 0.70 |
    """
    lines = ["", "bfloat16 over the faster float32, mean and worst of the shapes"]
    lines += [f"| rows | {' | '.join(found)} |", f"|---:|{'---:|' * len(found)}"]
    for rows in next(iter(found.values())):
        cells = [f"{mean(each[rows]):.2f}, {max(each[rows]):.2f}" for each in found.values()]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure_all(arguments: argparse.Namespace) -> int:
    if not library.available():
        return 1
    torch.set_num_threads(arguments.threads)
    units = "with" if HAS_BFLOAT16 else "without"
    print(f"\ninstructions: {instruction_set()}, {units} 16-bit units", flush=True)
    ratios: Ratios = {str(rows): [] for rows in arguments.rows}
    for inputs, outputs in SHAPES:
        measure(inputs, outputs, arguments, ratios)
    print(RATIOS + json.dumps(ratios))
    return 0


def measure(inputs: int, outputs: int, arguments: argparse.Namespace, ratios: Ratios) -> None:
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
        until = time.perf_counter() + arguments.seconds / len(SHAPES) / len(arguments.rows)
        for turn in range(arguments.turns):
            if turn and time.perf_counter() > until:
                break
            for name, (dtype, matmuls) in forms.items():
                seconds[name].append(timed(torch.randn(rows, inputs).to(dtype), matmuls, max(2, count // rows)))
        medians = {name: median(each) for name, each in seconds.items()}
        base = medians["PyTorch float32"]
        cells = [f"{each * 1e6:.0f} ({each / base:.2f})" for each in medians.values()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)
        ratios[str(rows)].append(medians["Weft bfloat16"] / min(base, medians["Weft float32"]))


def torch_matmul(matrix: Tensor) -> Matmul:
    return lambda x: F.linear(x, matrix)


def our_matmul(matrix: Tensor) -> Matmul:
    weight = prepare(Weight.of(matrix), twice=True)
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
