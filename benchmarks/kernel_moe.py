"""Mixture of experts: cases for `benchmarks.kernels`, compared with torch's grouped matmul on sorted rows.

python -m benchmarks.kernel_moe       tries blocks for every matmul; the best are in weft/kernels/cuda/moe/choices.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.floors import copy_bandwidth, recorded, seconds_of
from tests.support.kernels.operations import GPU, experts
from weft.kernels.cuda.linear.vectors import Vectors
from weft.kernels.cuda.moe.choices import WHOLE_TOKENS, Tiles, tiles, vectors
from weft.kernels.cuda.moe.few import few_experts
from weft.kernels.cuda.moe.some import some_experts
from weft.kernels.experts import Activation, clamped, gated

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]

DEVICE, DTYPE = "cuda", torch.bfloat16
TOKENS = (1, 8, 32, 128, 256, 4096)


@dataclass(frozen=True, slots=True)
class Sizes:
    count: int
    k: int
    hidden: int
    inner: int
    biased: bool = False

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * DTYPE.itemsize


MODELS = {
    "LFM2-8B-A1B": Sizes(32, 4, 2048, 1792),
    "Qwen3.5-35B-A3B": Sizes(256, 8, 2048, 512),
    "Granite-4.0-H-Small": Sizes(72, 10, 4096, 768),
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880, biased=True),
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Random experts, and tokens routed to them."""

    x: Tensor
    logits: Tensor
    first: Tensor
    second: Tensor
    activation: Activation
    biases: tuple[Tensor | None, Tensor | None]
    k: int

    def inputs(self) -> tuple[Any, ...]:
        routing = GPU.route_top(self.logits, self.k)
        return self.x, *routing, self.first, self.second, self.activation, *self.biases

    def floor_bytes(self, sizes: Sizes) -> float:
        """Return the bytes of the weights of every chosen expert, the inputs and the outputs."""
        chosen = len(GPU.route_top(self.logits, self.k)[1].unique())
        return chosen * sizes.expert_bytes + 2 * self.x.nbytes


def cases() -> Iterator[Case]:
    for name, sizes in MODELS.items():
        weights = random_weights(sizes)
        for tokens in TOKENS:
            mixture = mixture_of(sizes, tokens, *weights)
            peers = {"torch grouped": lambda mixture=mixture: sorted_by_torch(mixture)}
            call = lambda mixture=mixture: experts(*mixture.inputs(), by=GPU)  # noqa: E731
            yield f"{name}, {tokens} tokens, with routing", call, mixture.floor_bytes(sizes), peers


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE) * 0.03


def random_weights(sizes: Sizes) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    first = random(sizes.count, 2 * sizes.inner, sizes.hidden)
    second = random(sizes.count, sizes.hidden, sizes.inner)
    biases = (random(sizes.count, 2 * sizes.inner), random(sizes.count, sizes.hidden)) if sizes.biased else (None, None)
    return first, second, biases


def mixture_of(
    sizes: Sizes, tokens: int, first: Tensor, second: Tensor, biases: tuple[Tensor | None, Tensor | None]
) -> Mixture:
    activation = clamped() if sizes.biased else gated(F.silu)
    return Mixture(
        random(tokens, sizes.hidden), random(tokens, sizes.count), first, second, activation, biases, sizes.k
    )


def sorted_by_torch(mixture: Mixture) -> Tensor:
    """Compute the mixture with plain torch operations and its grouped matmul, without host–device synchronisation."""
    best, chosen = mixture.logits.float().topk(mixture.k, -1)
    weights = best.softmax(-1)
    flat, order = chosen.flatten().sort()
    numbers = torch.arange(len(mixture.first), device=DEVICE)
    ends = torch.searchsorted(flat, numbers, right=True).int()
    first_bias, second_bias = mixture.biases
    outer = F.grouped_mm(mixture.x[order // mixture.k], mixture.first.transpose(1, 2), offs=ends)
    outer = outer if first_bias is None else outer + first_bias[flat]
    output = F.grouped_mm(mixture.activation(outer), mixture.second.transpose(1, 2), offs=ends)
    output = output if second_bias is None else output + second_bias[flat]
    placed = torch.empty_like(output).index_copy_(0, order, output)
    return torch.bmm(weights.to(DTYPE).unsqueeze(1), placed.unflatten(0, chosen.shape)).squeeze(1)


def tune() -> None:
    """Print the best blocks of every matmul, one line each."""
    for name, sizes in MODELS.items():
        weights = random_weights(sizes)
        for tokens in TOKENS:
            mixture = mixture_of(sizes, tokens, *weights)
            floor = mixture.floor_bytes(sizes) / copy_bandwidth()
            for matmul in (0, 1):
                seconds, choice = min(alternatives(mixture, matmul), key=lambda found: found[0])
                print(f"{name}, {tokens} tokens, matmul {matmul}: {choice}, mixture {seconds / floor:.2f} x floor")


def alternatives(mixture: Mixture, matmul: int) -> Iterator[tuple[float, Any]]:
    """Yield the seconds of the whole mixture with every choice of blocks for one of its two matmuls."""
    inputs = (*mixture.inputs(), None)
    tokens, count = len(mixture.x), len(mixture.first)
    if tokens == 1:
        own = vectors(mixture.x.shape[1], mixture.second.shape[2], mixture.k)
        choices, way = VECTORS, few_experts
    else:
        own = tiles(DTYPE, tokens, mixture.k, count)
        choices = [replace(choice, pairs=own[0].pairs) for choice in TILES]
        way = partial(some_experts, tiled=tokens > WHOLE_TOKENS)
    for choice in choices:
        blocks = (choice, own[1]) if matmul == 0 else (own[0], choice)
        try:
            yield seconds_of(recorded(lambda blocks=blocks: way(*inputs, blocks)), repeats=7), choice
        except Exception as error:  # blocks may not fit
            print(f"  {choice}: {type(error).__name__}")


VECTORS = [Vectors(rows, warps) for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))]
TILES = [
    Tiles(16, outputs, inputs, warps, stages, first)
    for outputs, inputs, warps, stages in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 6))
    for first in (False, True)
    if 4096 <= outputs * inputs <= 16384 and outputs * inputs * stages <= 65536 and (outputs >= 64 or not first)
]


if __name__ == "__main__":
    tune()
