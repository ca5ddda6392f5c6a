"""Times matmuls with stored weights on a CPU, the formats taking turns.

python -m benchmarks.stored_cpu --threads 2 --rows 1 8 512
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import median
from time import perf_counter

import torch

from weft.kernels.cpu import linear
from weft.kernels.formats.block_types import Q4_K, Q6_K, Q8_0
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.rounded import INTEGERS
from weft.kernels.formats.stored import Stored
from weft.kernels.weight import Weight

OUTPUTS, INPUTS = 4096, 4096
# Rows that are multiplied in all turns of a format: at least LEAST turns.
ROWS_TIMED, LEAST = 160, 5


def integers(group: int, has_zeros: bool) -> Stored:
    groups = INPUTS // group
    tensors = [torch.randint(0, 256, (OUTPUTS, INPUTS // 2)).byte(), (torch.rand(OUTPUTS, groups) / 100).bfloat16()]
    if has_zeros:
        tensors.append(torch.randint(0, 16, (OUTPUTS, groups)).byte())
    return Grouped(4, group, has_zeros).of(tuple(tensors), INPUTS)


def blocks(form: BlockFormat, scales: tuple[int, ...]) -> Stored:
    codes = torch.randint(0, 256, (OUTPUTS, INPUTS // form.numbers, form.bytes)).byte()
    # The high bytes of all scales: small numbers.
    codes[..., list(scales)] = 0x14
    return form.of(codes.flatten(-2))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    given = {"Q4_K": blocks(Q4_K, (1, 3)), "Q6_K": blocks(Q6_K, (209,)), "Q8_0": blocks(Q8_0, (1,)),
             "INT4, 128": integers(128, False), "INT4, 128, zeros": integers(128, True),
             "INT4, 32": integers(32, False)}  # fmt: skip
    weights = {name: linear.prepare(Weight((each,)), False, rounds={INTEGERS}) for name, each in given.items()}
    for rows in arguments.rows:
        x, times = torch.randn(rows, INPUTS), {name: list[float]() for name in weights}
        for _ in range(max(LEAST, ROWS_TIMED // rows)):
            for name, weight in weights.items():
                begin = perf_counter()
                linear.linear(x, weight)
                times[name].append(1e3 * (perf_counter() - begin))
        for name, found in times.items():
            size = weights[name].parts[0].bytes / 2**20
            print(f"{rows:3} rows  {name:<18}{size:6.2f} MiB  least {min(found):.3f} ms, median {median(found):.3f} ms")


if __name__ == "__main__":
    main()
