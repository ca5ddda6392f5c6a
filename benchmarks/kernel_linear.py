"""Matmuls of up to 512 rows with weights: cases for `benchmarks.kernels`, compared with cuBLAS.

    python -m benchmarks.kernels linear
    python -m benchmarks.kernel_linear                  tries all blocks and cuts of every matmul and prints the best
    python -m benchmarks.kernel_linear Falcon LFM2      only layers whose names begin with these; compiling takes time

Every layer of a run has its own weights, so that none are cached. Outputs that are added to the residual stream stay
split in parts, as in a step. Where our kernel fuses the activation, cuBLAS is followed by our activation kernel. A case
whose output is not that of cuBLAS fails.
Isolated matmuls favour other cuts than whole steps do; the cuts of `cut` were chosen by timing whole steps.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.floors import copy_bandwidth, one_after_another, recorded, seconds_of
from weft.kernels.cuda.activation import activate
from weft.kernels.cuda.launch.gpus import gpu_of
from weft.kernels.cuda.linear import matmul, suits
from weft.kernels.cuda.linear.few import Cut, cut, few_rows, rows_compiled
from weft.kernels.cuda.linear.one import blocks, one_row
from weft.kernels.cuda.linear.vectors import LOADS, Vectors

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]

DEVICE, DTYPE, ROWS = "cuda", torch.bfloat16, (1, 8, 32, 128, 512)
# Row counts that blocks and cuts are tried for.
TRIED_ROWS = (1, 32)
# Layers measured together, so that the start of the graph counts once.
COUNT = 16
# Shared memory per program on an H200.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class Layer:
    outputs: int
    inputs: int
    activation: str | None = None
    parts: int = 1
    summed: bool = True

    def floor_bytes(self, rows: int) -> int:
        """Return the bytes of the weights, the inputs and the outputs."""
        return (self.outputs * self.inputs + rows * (self.inputs + self.outputs // self.parts)) * DTYPE.itemsize

    def random_weights(self) -> Sequence[Tensor]:
        shape = (COUNT, self.outputs, self.inputs)
        return torch.randn(shape, dtype=DTYPE, device=DEVICE).mul_(self.inputs**-0.5).unbind()

    def is_ours(self, x: Tensor, weight: Tensor) -> bool:
        return suits(x, weight, activated=self.activation is not None)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x, weight, None, self.activation, self.parts, self.summed)

    def multiply_by(self, by: Cut | Vectors, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(by, Vectors):
            return one_row(x, weight, None, self.activation, self.parts, by)
        return few_rows(x, weight, None, self.activation, self.parts, self.summed, by)

    def check(self, x: Tensor, weight: Tensor) -> None:
        """Compare our output with cuBLAS's; both round where the other does."""
        own = self.multiply(x, weight)
        own = own.sum(0).to(x.dtype) if own.ndim == 3 else own
        torch.testing.assert_close(own, self.multiply_by_cublas(x, weight), rtol=3e-2, atol=3e-2)

    def multiply_by_cublas(self, x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return y if self.activation is None else activate(self.activation, *y.chunk(self.parts, -1))


LAYERS = {
    "Falcon-H1-7B in": Layer(8728, 3072),
    "Falcon-H1-7B out": Layer(3072, 4608, summed=False),
    "Falcon-H1-7B gates": Layer(24576, 3072, "silu", 2),
    "Falcon-H1-7B down": Layer(3072, 12288, summed=False),
    "Nemotron-Nano-9B in": Layer(22656, 4480),
    "Nemotron-Nano-9B out": Layer(4480, 10240, summed=False),
    "Nemotron-Nano-9B up": Layer(15680, 4480, "relu2"),
    "Nemotron-Nano-9B down": Layer(4480, 15680, summed=False),
    "Nemotron-Nano-9B qkv": Layer(7168, 4480),
    "Nemotron-Nano-9B o": Layer(4480, 5120, summed=False),
    "Qwen3.5-9B in": Layer(12352, 4096),
    "Qwen3.5-9B out": Layer(4096, 4096, summed=False),
    "Qwen3.5-9B gates": Layer(24576, 4096, "silu", 2),
    "Qwen3.5-9B down": Layer(4096, 12288, summed=False),
    "Qwen3.5-9B qkv": Layer(10240, 4096),
    "LFM2-1.2B in": Layer(6144, 2048),
    "LFM2-1.2B out": Layer(2048, 2048, summed=False),
    "LFM2-1.2B gates": Layer(16384, 2048, "silu", 2),
    "LFM2-1.2B down": Layer(2048, 8192, summed=False),
    "LFM2-1.2B qkv": Layer(3072, 2048),
}


def cases() -> Iterator[Case]:
    for name, layer in LAYERS.items():
        weights = layer.random_weights()
        for rows in ROWS:
            x = torch.randn(rows, layer.inputs, dtype=DTYPE, device=DEVICE)
            if not layer.is_ours(x, weights[0]):
                continue
            layer.check(x, weights[0])
            own = one_after_another([partial(layer.multiply, x, weight) for weight in weights])
            peer = one_after_another([partial(layer.multiply_by_cublas, x, weight) for weight in weights])
            yield f"{name}, {rows} rows, {COUNT} layers", own, COUNT * layer.floor_bytes(rows), {"cuBLAS": peer}


def vectors(layer: Layer) -> Iterator[Vectors]:
    """Yield the blocks for one row whose weights fit into registers.

    >>> blocks(4096, 12288, 1) in vectors(Layer(4096, 12288))
    True
    """
    for rows, warps in itertools.product((1, 2, 4, 8), (2, 4, 8)):
        by = Vectors(rows, warps)
        if rows * layer.parts * by.pieces(layer.inputs) <= LOADS:
            yield by


def cuts(rows: int, outputs: int, inputs: int) -> Iterator[Cut]:
    """Yield the cuts that fit into shared memory and make a reasonable number of programs.

    >>> cut(32, 3072, 12288) in cuts(32, 3072, 12288), Cut(64, 4, 128, 4, 5) in cuts(32, 24576, 3072)
    (True, False)
    """
    kinds = ((32, 4), (64, 4), (64, 8)) if rows <= 16 else ((64, 4), (128, 4), (128, 8), (256, 8))
    steps = (128, 256) if rows <= 16 else (64, 128)
    for (width, warps), step, stages, shares in itertools.product(kinds, steps, range(2, 6), (1, 2, 4)):
        # The first weights are loaded before the loop, into an extra buffer.
        needed = (stages + 1) * step * (width + rows_compiled(rows)) * DTYPE.itemsize
        programs = -(-outputs // width) * shares
        split = shares == 1 or (programs <= 480 and inputs >= 4 * step * shares)
        if needed <= SHARED_BYTES and programs >= 64 and split:
            yield Cut(width, shares, step, warps, stages)


def try_cuts(name: str, layer: Layer, weights: Sequence[Tensor], rows: int) -> None:
    """Print the five best choices, the one in use and cuBLAS; print the error of those that fail."""
    x = torch.randn(rows, layer.inputs, dtype=DTYPE, device=DEVICE)
    usual: Cut | Vectors
    others: Iterator[Cut | Vectors]
    if rows == 1:
        usual, others = blocks(layer.outputs // layer.parts, layer.inputs, layer.parts), vectors(layer)
    else:
        usual = cut(rows, layer.outputs, layer.inputs, gpu_of(x.device))
        others = cuts(rows, layer.outputs, layer.inputs)
    ways: dict[Cut | Vectors | str, Callable[..., Any]] = {"cuBLAS": layer.multiply_by_cublas}
    ways |= {by: partial(layer.multiply_by, by) for by in (usual, *others)}
    found = {}
    for way, multiply in ways.items():
        try:
            call = one_after_another([partial(multiply, x, weight) for weight in weights])
            found[way] = seconds_of(recorded(call), repeats=7) / COUNT
        except Exception as error:  # a cut may need too many registers or too much shared memory
            print(f"  {way}: {str(error).strip().splitlines()[-1][-100:]}")
    floor = layer.floor_bytes(rows) / copy_bandwidth()
    print(f"{name}, {rows} rows, floor {floor * 1e6:.1f} µs")
    for place, (way, seconds) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        if place < 5 or way in (usual, "cuBLAS"):
            mark = "  (in use)" if way == usual else ""
            print(f"  {seconds * 1e6:8.1f} µs, {seconds / floor:.2f} of the floor: {way}{mark}", flush=True)


def main() -> int:
    beginnings = tuple(sys.argv[1:]) or ("",)
    for name in filter(lambda name: name.startswith(beginnings), LAYERS):
        weights = LAYERS[name].random_weights()
        for rows in TRIED_ROWS:
            try_cuts(name, LAYERS[name], weights, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
