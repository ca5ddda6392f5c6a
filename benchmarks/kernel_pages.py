"""Attention of decodes over pages of 16 and of eight bits: variants of the decode kernel, each checked and timed.

    python -m benchmarks.kernel_pages
    python -m benchmarks.kernel_pages --rows 64 --context 4096 --heads 32 8 128

A line is a kernel with its merging, as the layers of a step follow each other. The floor is the bytes of keys and
values, with their exponents, at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.floors import copy_bandwidth, one_after_another, recorded, seconds_of
from benchmarks.kernel_attention import CELL
from tests.support.kernels.operations import GPU
from tests.support.kernels.plans import Row, make_plan
from weft.device.store import DTYPES, AttentionView
from weft.kernels.cuda.attention.decode import DecodeLaunch, attend_decodes, multiprocessors_of, share_out
from weft.kernels.cuda.launch.ahead import compiling_ahead
from weft.kernels.interface import Batch
from weft.kernels.pages import decoded, encoded
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.batching import build_batch

# Layers that follow each other, and the share of the largest output that an output may be wrong by.
LAYERS, TOLERANCE = 4, 2e-2
# Pages of random numbers: all others repeat them.
DRAWN = 256


class Variant(NamedTuple):
    launch: DecodeLaunch | None  # None: that of the table
    at_once: int = 0

    def __str__(self) -> str:
        if self.launch is None:
            return "as it is"
        return (
            f"{self.launch.keys} keys, {self.launch.warps} warps, {self.launch.stages} stages, {self.at_once} programs"
        )


CODED = (
    Variant(None),
    Variant(DecodeLaunch(32, 2, 3), 4),
    Variant(DecodeLaunch(32, 2, 4), 4),
    Variant(DecodeLaunch(64, 2, 2), 4),
    Variant(DecodeLaunch(64, 2, 3), 4),
    Variant(DecodeLaunch(32, 4, 4), 3),
    Variant(DecodeLaunch(64, 4, 3), 2),
    Variant(DecodeLaunch(64, 4, 3), 3),
)
VARIANTS = {"bfloat16": (Variant(None),), "fp8": CODED, "int8": CODED}


class Pages:
    """Rows of the same length, whose pages are in no order, as a store of these numbers holds them."""

    def __init__(self, rows: int, context: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
        count = rows * context // CELL
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [order[row * context // CELL :][: context // CELL] for row in range(rows)]
        plan = make_plan([Row(context - 1, context, pages=table) for table in tables])
        spec = MemorySpec((AttentionMemory(kv_heads, head_dim, "bfloat16", None),))
        board = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.batch: Batch = build_batch(plan, spec, board, "cuda", GPU)
        self.scale, self.kind = head_dim**-0.5, dtype
        generator = torch.Generator("cuda").manual_seed(0)
        # Few tokens weigh most, so that a wrong one shows.
        self.q = 6 * torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.bfloat16, device="cuda")
        drawn = torch.randn(DRAWN, 2, CELL, kv_heads, head_dim, generator=generator, device="cuda").bfloat16()
        drawn *= torch.rand(DRAWN, 2, CELL, kv_heads, 1, generator=generator, device="cuda").bfloat16() * 4
        self.store, self.exponents = self.filled(drawn, count), None
        if dtype != "bfloat16":
            codes, exponents = encoded(drawn, DTYPES[dtype])
            self.store = self.filled(codes.view(torch.uint8), count).view(DTYPES[dtype])
            self.exponents = self.filled(exponents, count)

    def filled(self, drawn: Tensor, count: int) -> Tensor:
        return drawn[torch.arange(count, device="cuda") % DRAWN]

    @property
    def view(self) -> AttentionView:
        if self.exponents is None:
            return AttentionView(self.store[:, 0], self.store[:, 1], None)
        return AttentionView(self.store[:, 0], self.store[:, 1], None, self.exponents[:, 0], self.exponents[:, 1])

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.store, self.exponents) if each is not None)

    def call(self, variant: Variant, out: Tensor) -> Callable[[], Any]:
        sharing = share_out(multiprocessors_of(out.device), self.view.keys.shape[2], variant.at_once)
        given = self.q, out, self.batch, self.view, self.scale, None, None
        return partial(attend_decodes, *given, None if variant.launch is None else sharing, variant.launch)

    def wanted(self) -> Tensor:
        """Return the attention over what the pages hold, in float32, row by row."""
        assert self.batch.full is not None
        found = []
        kv_heads = self.view.keys.shape[2]
        for row, table in enumerate(self.batch.full.pages.view(len(self.q), -1).long()):
            pages = self.store.view(torch.uint8)[table].view(self.store.dtype)
            numbers = pages.float()
            if self.exponents is not None:
                numbers = decoded(pages, self.exponents[table], torch.float32)
            keys, values = (numbers[:, part].flatten(0, 1) for part in (0, 1))
            q = self.q[row].float().view(kv_heads, -1, self.q.shape[2])
            weights = (torch.einsum("hgd,thd->hgt", q, keys) * self.scale).softmax(-1)
            found.append(torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1))
        return torch.stack(found)


def lines(pages: Pages, variants: tuple[Variant, ...]) -> Iterator[str]:
    """Yield a line for each variant: what it takes, if it is right."""
    wanted, out = pages.wanted(), torch.empty_like(pages.q)
    floor = pages.bytes / copy_bandwidth()
    for variant in variants:
        call = pages.call(variant, out)
        try:
            out.fill_(math.nan)
            call()
            wrong = float((out.float() - wanted).abs().max() / wanted.abs().max())
            if not wrong <= TOLERANCE:
                yield f"{pages.kind:9} wrong by {wrong:.4f}: {variant}"
                continue
            seconds = seconds_of(recorded(one_after_another([call] * LAYERS)), repeats=7, flush=False) / LAYERS
        except Exception as error:  # usually too much shared memory
            yield f"{pages.kind:9} {variant}: {str(error).strip().splitlines()[-1][:100]}"
            continue
        share = floor / seconds
        yield f"{pages.kind:9} {seconds * 1e6:8.1f} us, {share:6.1%} of the floor, off by {wrong:.4f}: {variant}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=32768, help="a multiple of 64")
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[16, 4, 256], help="of queries, of keys, features of each"
    )
    options = parser.parse_args()
    scene = partial(Pages, options.rows, options.context, *options.heads)
    torch.backends.cuda.matmul.allow_tf32 = False
    with compiling_ahead():  # collected, not started
        for kind, variants in VARIANTS.items():
            pages = Pages(1, CELL, *options.heads, kind)
            for variant in variants:
                pages.call(variant, torch.empty_like(pages.q))()
    print(f"a copy moves {copy_bandwidth() / 1e12:.2f} TB/s", flush=True)
    for kind, variants in VARIANTS.items():
        for line in lines(scene(kind), variants):
            print(line, flush=True)


if __name__ == "__main__":
    main()
