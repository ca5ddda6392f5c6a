"""A short convolution with its matmul, and both by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernels.operations import GPU_ROWS, gated_short_conv, projected_short_conv
from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
from weft.device.store import RecurrentView
from weft.kernels.cuda.linear import matmul
from weft.kernels.interface import Batch, Operations
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

CELL = 8
# The first tokens of a sequence and of a later cell, the last ones of either, and some between.
STARTS = (0, 1, 2, 7, 8, 9, 10, 15, 23, 21, 3, 16)


def decodes(rows: int, spec: MemorySpec, device: str, operations: Operations = GPU_ROWS, first: int = 0) -> Batch:
    """Rows with slots and tails of their own; of those that close their cell, every other one hands out its window.

    `first` is the place of the first row's start in `STARTS`.
    """
    starts = [STARTS[(first + row) % len(STARTS)] for row in range(rows)]
    plan_rows = [Row(s, s + 1, row if s >= CELL else NOWHERE, rows - 1 - row) for row, s in enumerate(starts)]
    closing = [row for row, start in enumerate(starts) if start % CELL == CELL - 1]
    captures = [Capture(row, starts[row] + 1, rows + row) for row in closing[::2]]
    board = torch.zeros(99, dtype=torch.int64, device=device)
    return build_batch(make_plan(plan_rows, captures), spec, board, device, operations)


class Case:
    """A layer's weights, a step of decodes, and what its rows remember."""

    # Triton's interpreter multiplies float16 right, bfloat16 not.
    def __init__(self, rows, inputs, channels, width, dtype=torch.float16, device="cpu", bias=False, room=0, first=0):
        memory = short_conv_memory(channels, width, str(dtype).removeprefix("torch."))
        self.spec = MemorySpec((memory,), cell=CELL, draft_room=room)
        self.batch = decodes(rows, self.spec, device, first=first)

        def made(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device).to(kind)

        self.x = made(rows, inputs + 16)[:, :inputs]
        self.projection = made(3 * channels, inputs) / inputs**0.5
        self.projection_bias = made(3 * channels) if bias else None
        self.weight = made(width, channels, kind=torch.float32).t() / width**0.5
        self.bias = made(channels, kind=torch.float32) if bias else None
        self.state = made(2 * rows, width - 1, channels)
        self.tail = made(rows, width - 1 + room, channels)

    def view(self) -> RecurrentView:
        return RecurrentView({"conv": self.state.clone()}, {"conv": self.tail.clone()})

    def together(self, view: RecurrentView) -> Tensor:
        weights = (self.projection, self.projection_bias, None, self.weight, self.bias)
        return projected_short_conv(self.x, *weights, self.batch, view)

    def one_by_one(self, view: RecurrentView) -> Tensor:
        projected = matmul(self.x, self.projection, self.projection_bias)
        return gated_short_conv(projected, self.weight, self.bias, self.batch, view)


def assert_close(found: Tensor, wanted: Tensor, mine: RecurrentView, theirs: RecurrentView, tolerance: float) -> None:
    memory = ((mine.tail["conv"], theirs.tail["conv"]), (mine.state["conv"], theirs.state["conv"]))
    for one, other in ((found, wanted), *memory):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
