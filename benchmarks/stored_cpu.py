"""Times matmuls with four-bit weights on one thread of a CPU, the formats taking turns.

python -m benchmarks.stored_cpu
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from weft.kernels.cpu import linear
from weft.kernels.formats.block_types import Q4_K
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.stored import Stored
from weft.kernels.weight import Weight

OUTPUTS, INPUTS = 4096, 4096
TURNS = {1: 40, 4: 20, 16: 10}


def integers(group: int, has_zeros: bool) -> Stored:
    groups = INPUTS // group
    tensors = [torch.randint(0, 256, (OUTPUTS, INPUTS // 2)).byte(), (torch.rand(OUTPUTS, groups) / 100).bfloat16()]
    if has_zeros:
        tensors.append(torch.randint(0, 16, (OUTPUTS, groups)).byte())
    return Grouped(4, group, has_zeros).of(tuple(tensors), INPUTS)


def blocks() -> Stored:
    codes = torch.randint(0, 256, (OUTPUTS, INPUTS // Q4_K.numbers, Q4_K.bytes)).byte()
    # The high bytes of both scales: small numbers.
    codes[..., 1] = codes[..., 3] = 0x14
    return Q4_K.of(codes.flatten(-2))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    given = {"Q4_K": blocks(), "INT4, 128": integers(128, False), "INT4, 128, zeros": integers(128, True),
             "INT4, 32": integers(32, False)}  # fmt: skip
    weights = {name: linear.prepare(Weight((each,)), False, rounds=True) for name, each in given.items()}
    for rows, turns in TURNS.items():
        x, times = torch.randn(rows, INPUTS), {name: list[float]() for name in weights}
        for _ in range(turns):
            for name, weight in weights.items():
                begin = perf_counter()
                linear.linear(x, weight)
                times[name].append(1e3 * (perf_counter() - begin))
        for name, found in times.items():
            size = weights[name].parts[0].bytes / 2**20
            print(f"{rows:3} rows  {name:<18}{size:6.2f} MiB  least {min(found):.3f} ms, median {median(found):.3f} ms")


if __name__ == "__main__":
    main()
