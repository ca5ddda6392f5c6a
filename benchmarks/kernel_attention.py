"""Paged attention: cases for `benchmarks.kernels`. Decodes are bound by bytes, prompts by the matmul rate.

    python -m benchmarks.kernel_attention          tries launches of the decode and prefill kernels, prints the best

Compared with FlashInfer, if installed, and with PyTorch's attention on keys and values that are already contiguous.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.floors import copy_bandwidth, matrix_rate, recorded, seconds_of
from tests.support.kernels.operations import GPU
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import AttentionView
from weft.kernels.cuda import attention
from weft.kernels.cuda.attention import flashinfer
from weft.kernels.cuda.attention.decode import DecodeLaunch, attend_decodes
from weft.kernels.cuda.attention.prefill import PrefillLaunch as BlockLaunch
from weft.kernels.cuda.attention.prefill import attend_pieces
from weft.kernels.interface import Batch, PageList
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

CELL = 64
Call = Callable[[], Any]


@dataclass
class Scene:
    """Random pages of one layer, interleaved with those of others, and a step that reads them."""

    rows: list[tuple[int, int]]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    layers: int = 2

    def __post_init__(self) -> None:
        firsts = [0 if self.window is None else max(0, start - self.window + 1) // CELL for start, _ in self.rows]
        counts = [-(-end // CELL) - first for (_, end), first in zip(self.rows, firsts)]
        numbers = random.Random(0).sample(range(sum(counts)), sum(counts))
        tables = [[numbers.pop() for _ in range(count)] for count in counts]
        rows = [
            Row(start, end, pages=table, window_pages=table, window_first=first)
            for (start, end), table, first in zip(self.rows, tables, firsts)
        ]
        spec = MemorySpec((AttentionMemory(self.kv_heads, self.head_dim, "bfloat16", self.window),))
        board = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.batch: Batch = build_batch(make_plan(rows), spec, board, "cuda", GPU)
        shape = (sum(counts), 2 * self.layers, CELL, self.kv_heads, self.head_dim)
        self.store = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        tokens = sum(end - start for start, end in self.rows)
        self.q = torch.randn(tokens, self.heads, self.head_dim, dtype=torch.bfloat16, device="cuda")

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def listed(self) -> PageList:
        return self.batch.pages(self.window)

    def view(self, layer: int = 0) -> AttentionView:
        return AttentionView(self.store[:, 2 * layer], self.store[:, 2 * layer + 1], self.window)

    def attend(self, layer: int = 0) -> Tensor:
        return attention.read_pages(self.q, self.batch, self.view(layer), self.scale)

    def attend_with_triton(self) -> Tensor:
        out = torch.empty_like(self.q)
        attend_pieces(self.q, out, self.batch, self.view(), self.scale, None, None)
        return out

    @property
    def bytes(self) -> int:
        """Return the bytes of keys, values, queries and outputs, each once."""
        lengths = [end - (0 if self.window is None else max(0, start - self.window + 1)) for start, end in self.rows]
        return 4 * sum(lengths) * self.kv_heads * self.head_dim + 4 * self.q.numel()

    @property
    def operations(self) -> float:
        """Count the operations of two matmuls over the tokens that each query attends to."""
        window = self.window or 1 << 40
        seen = sum(min(position + 1, window) for start, end in self.rows for position in range(start, end))
        return 4 * seen * self.heads * self.head_dim

    @property
    def floor_bytes(self) -> float:
        """Return the bytes whose copy takes as long as the slower of moving and multiplying."""
        return max(self.bytes, self.operations / matrix_rate() * copy_bandwidth())

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of equally long rows, in the layout that suits PyTorch's attention best."""
        pages = self.store[self.listed.pages.long()]
        keys, values = (x.reshape(len(self.rows), -1, self.kv_heads, self.head_dim) for x in (pages[:, 0], pages[:, 1]))
        q = self.q.view(len(self.rows), -1, self.heads, self.head_dim)
        return tuple(x.transpose(1, 2).contiguous() for x in (q, keys, values))

    def attend_with_torch(self) -> Tensor:
        q, keys, values = self.contiguous
        return F.scaled_dot_product_attention(q, keys, values, is_causal=q.shape[2] > 1, enable_gqa=True)


def decode_with_flashinfer(scene: Scene) -> Call:
    """Return a call of FlashInfer's decode, planned beforehand for these lengths."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = torch.tensor([(end - 1) % CELL + 1 for _, end in scene.rows], dtype=torch.int32)
    wrapper.plan(
        scene.listed.host_bounds, scene.listed.pages, last, scene.heads, scene.kv_heads, scene.head_dim, CELL,
        window_left=-1 if scene.window is None else scene.window - 1, q_data_type=torch.bfloat16,
    )  # fmt: skip
    out, view = torch.empty_like(scene.q), scene.view()
    return lambda: wrapper.run(scene.q, (view.keys, view.values), out=out)


def decodes() -> dict[str, Scene]:
    mixed = [random.Random(row).randint(200, 8000) for row in range(64)]
    return {
        "decode 128 x 512, 32/8 heads of 128": Scene([(511, 512)] * 128, 32, 8, 128),
        "decode 64 x 4,096, 32/8 heads of 128": Scene([(4095, 4096)] * 64, 32, 8, 128),
        "decode 64 x 200..8,000": Scene([(length - 1, length) for length in mixed], 32, 8, 128),
        "decode 1 x 512, 32/8 heads of 64": Scene([(511, 512)], 32, 8, 64),
        "decode 1 x 32,768, 32/8 heads of 128": Scene([(32767, 32768)], 32, 8, 128),
        "decode 32 x 2,048, 16/8 heads of 256": Scene([(2047, 2048)] * 32, 16, 8, 256),
        "decode 64 x 4,096, 64/8 heads of 64, window 128": Scene([(4095, 4096)] * 64, 64, 8, 64, window=128),
    }


def prompts() -> dict[str, Scene]:
    return {
        "prompt of 8,192, 32/8 heads of 128": Scene([(0, 8192)], 32, 8, 128),
        "4 x 2,048 behind 2,048, 32/8 heads of 128": Scene([(2048, 4096)] * 4, 32, 8, 128),
        "64 x 17..130 behind 1,000": Scene([(1000, 1017 + 113 * i // 63) for i in range(64)], 32, 8, 128),
    }


def cases() -> Iterator[tuple[str, Call, float, dict[str, Call]]]:
    has_flashinfer = flashinfer.is_installed()
    for name, scene in decodes().items():
        peers = {"flashinfer": decode_with_flashinfer(scene)} if has_flashinfer else {}
        if scene.window is None and len({end for _, end in scene.rows}) == 1 and scene.rows[0][1] % CELL == 0:
            peers["torch"] = scene.attend_with_torch
        yield name, scene.attend, scene.floor_bytes, peers
    for name, scene in prompts().items():
        attention.warm([attention.shape_of(scene.q, scene.view(), scene.scale, None)])
        flashinfer.finish_compiling()
        peers = {"triton": scene.attend_with_triton}
        if len(scene.rows) == 1:
            peers["torch"] = scene.attend_with_torch
        yield name, scene.attend, scene.floor_bytes, peers


# choosing launches --------------------------------------------------------------------------------------------------


def tune_decode(scene: Scene, launches: list[DecodeLaunch]) -> list[tuple[float, DecodeLaunch]]:
    """Return the seconds of every launch that compiles, best first."""
    found = []
    out, batch, view = torch.empty_like(scene.q), scene.batch, scene.view()
    for launch in launches:
        call = partial(attend_decodes, scene.q, out, batch, view, scene.scale, None, None, launch=launch)
        try:
            found.append((seconds_of(recorded(call), repeats=9), launch))
        except Exception as error:  # usually too much shared memory
            print("  ", launch, str(error).strip().splitlines()[-1][:100])
    return sorted(found)


def tune_prefill(scene: Scene, launches: list[BlockLaunch]) -> list[tuple[float, BlockLaunch]]:
    found = []
    out, batch, view = torch.empty_like(scene.q), scene.batch, scene.view()
    for launch in launches:
        call = partial(attend_pieces, scene.q, out, batch, view, scene.scale, None, None, launch=launch)
        try:
            found.append((seconds_of(recorded(call), repeats=7), launch))
        except Exception as error:  # usually too much shared memory
            print("  ", launch, str(error).strip().splitlines()[-1][:100])
    return sorted(found)


def main() -> None:
    for name, scene in decodes().items():
        launches = [DecodeLaunch(*each) for each in itertools.product((32, 64), (2, 4), (2, 3, 4))]
        print(name, *tune_decode(scene, launches)[:5], sep="\n   ")
    for name, scene in prompts().items():
        launches = [BlockLaunch(*each) for each in itertools.product((64, 128), (4, 8), (2, 3, 4))]
        print(name, *tune_prefill(scene, launches)[:5], sep="\n   ")


if __name__ == "__main__":
    main()
