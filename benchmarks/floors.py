"""Lower bounds of time: the rates of this machine, and the bytes and operations of a step.

Bandwidth and matmul rate are measured in the same run as the times they are compared with. Bytes and operations are
counted from a model on the meta device and its memory specification, without running it. On a CPU this is only good
for trying out the benchmarks.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.kernels.choosing import everywhere
from weft.memory.spec import AttentionMemory, MemorySpec, RecurrentMemory
from weft.models.config import read_config, text_part
from weft.models.finding import find_checkpoint
from weft.models.layers.embedding import Embedding
from weft.models.model import CausalModel
from weft.models.weights import build

# Larger than any cache.
FLUSH_BYTES = 256 << 20


# timing -------------------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any], device: str = "cuda", repeats: int = 20, flush: bool = True) -> float:
    """Return the median seconds of a call, measured on the device, with cold caches."""
    for _ in range(3):
        call()
    if device == "cpu":
        return statistics.median(_on_host(call) for _ in range(repeats))
    trash = torch.zeros(FLUSH_BYTES // 8 if flush else 0, dtype=torch.int64, device=device)
    pairs = []
    for _ in range(repeats):
        # Read rather than write: written data would still be leaving the caches while the call runs.
        trash.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def _on_host(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call as a CUDA graph, to leave out launch overhead, or the call itself if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def one_after_another(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Combine calls, as layers follow each other in a step; start-up and tail effects then count once, not per call."""

    def call() -> None:
        for each in calls:
            each()

    return call


# rates of the machine -----------------------------------------------------------------------------------------------


@functools.cache
def copy_bandwidth(device: str = "cuda") -> float:
    """Return the bytes per second of a large copy, reads plus writes."""
    size = 2 << 30 if device == "cuda" else 64 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device, repeats=10, flush=False)


@functools.cache
def matrix_rate(device: str = "cuda") -> float:
    """Return the operations per second of the best of a few large bfloat16 matmuls on random numbers."""
    sizes = [(8192, 8192, 8192), (16384, 4096, 16384), (8192, 16384, 4096)] if device == "cuda" else [(512, 512, 512)]
    best = 0.0
    for rows, inner, columns in sizes:
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        right = torch.randn(columns, inner, device=device, dtype=torch.bfloat16).t()
        seconds = seconds_of(functools.partial(torch.mm, left, right), device, repeats=10, flush=False)
        best = max(best, 2 * rows * inner * columns / seconds)
    return best


# bytes and operations of a model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sketch:
    """A model without weights, and its memory specification."""

    model: CausalModel
    spec: MemorySpec

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.bfloat16) -> Sketch:
        """Return the sketch of a packaged configuration, a config.json or a checkpoint folder."""
        found = find_checkpoint(name, with_weights=False)
        config = text_part(read_config(found if found.is_file() else found / "config.json"))
        model = build(config, dtype, "meta")
        return cls(model, MemorySpec(model.memories(everywhere("cpu"))))

    @property
    def weight_bytes(self) -> int:
        return sum(_bytes(p) for p in self.model.parameters())

    def active_weight_bytes(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` tokens reads, if all experts are equally likely."""
        return self._weights(rows, _bytes)

    def active_parameters(self) -> float:
        """Return the number of parameters that one token is multiplied with, without the LM head."""
        head = self.model.lm_head
        own = 0 if head is None else head.weight.numel()
        tied = sum(m.weight.numel() for m in self.model.modules() if isinstance(m, Embedding)) if head is None else 0
        return self._weights(1, lambda p: p.numel()) - own - tied

    def _weights(self, rows: int, measure: Callable[[torch.Tensor], int]) -> float:
        total = sum(measure(p) for p in self.model.parameters())
        if getattr(self.model, "lm_head", None) is not None:
            # An embedding that is not tied to the head is not read in full, only the rows of the step's tokens.
            total -= sum(measure(m.weight) for m in self.model.modules() if isinstance(m, Embedding))
        for layer in self.model.modules():
            if hasattr(layer, "route") and isinstance(getattr(layer, "experts", None), nn.Module):
                experts = layer.experts
                count, chosen = experts.first.shape[0], layer.route.options["k"]
                used = 1 - (1 - chosen / count) ** rows
                total -= (1 - used) * sum(measure(p) for p in experts.parameters())
        return total

    def memory_bytes(self, position: int) -> float:
        """Return the bytes that one decoding row reads (checkpoint, tail, KV) and writes at a position.

        Every token is appended to the tail and to KV. Only the last token of a cell writes a checkpoint, so every token
        counts its share of that.
        """
        spec, total = self.spec, 0.0
        open_cell = position % spec.cell
        for memory in spec.memories:
            if isinstance(memory, AttentionMemory):
                seen = position if memory.window is None else min(position, memory.window)
                total += memory.bytes_per_token * (seen + 1)
            elif isinstance(memory, RecurrentMemory):
                state = sum(part.bytes for part in memory.state)
                total += state * ((position >= spec.cell) + 1 / spec.cell)
                for part in memory.tail:
                    kept = memory.conv_width - 1 if part.name == "conv" else open_cell
                    total += part.bytes * (kept + 1)
        return total

    def decode_bytes(self, rows: int, positions: range) -> float:
        """Return the bytes of one decode step of `rows` rows, as a mean over the positions."""
        memory = statistics.mean(self.memory_bytes(position) for position in positions)
        return self.active_weight_bytes(rows) + rows * memory

    def prefill_operations(self, tokens: int, start: int = 0) -> float:
        """Count the operations of matmuls and attention for tokens [start, start + tokens), without recurrent scans."""
        total = 2 * self.active_parameters() * tokens
        for layer, memory in zip(self.model.mixers(), self.spec.memories, strict=True):
            if isinstance(memory, AttentionMemory):
                window = memory.window or start + tokens
                pairs = sum(min(p + 1, window) for p in range(start, start + tokens))
                total += 4 * layer.shape.heads * memory.head_dim * pairs
        return total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
