"""State space recurrence (Mamba2): cases for `benchmarks.kernels`, at the sizes of public models.

    python -m benchmarks.kernels ssd
    python -m benchmarks.kernel_ssd             tries every choice of the kernels' shapes and prints the best

Compared with a decode that updates states in place, as engines with mutable states do, and with the Triton kernels of
mamba_ssm, if installed, which capture the last state only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchmarks.floors import copy_bandwidth, one_after_another, recorded, seconds_of
from tests.support.kernels.operations import GPU, ssd, ssd_memory
from tests.support.kernels.plans import NOWHERE, Capture, Row, make_plan
from weft.device.store import RecurrentView, Store
from weft.kernels.cuda.ssd import decode, extend
from weft.kernels.cuda.ssd.choices import CellsChoice, DecodeChoice
from weft.kernels.recurrent import UNLIMITED, SsdInputs
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]
# Decode layers measured together.
LAYERS = 8


class Sizes(NamedTuple):
    name: str
    heads: int
    head_dim: int
    state: int
    groups: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.groups * self.state

    @property
    def state_bytes(self) -> int:
        return self.inner * self.state * 4

    @property
    def token_bytes(self) -> int:
        """Return the bytes of x, y, B, C and dt of one token, in bfloat16."""
        return 2 * (2 * self.inner + 2 * self.keys + self.heads)


NEMOTRON_NANO = Sizes("Nemotron-Nano-9B", 128, 80, 128, 8)
GRANITE_SMALL = Sizes("Granite-4.0-H-Small", 128, 64, 128, 1)
FALCON_7B = Sizes("Falcon-H1-7B", 24, 128, 256, 1)


class Layer:
    """One layer in bfloat16: memory, parameters, and the projections of a step's tokens."""

    def __init__(self, sizes: Sizes, rows: Sequence[Row], captures: Sequence[Capture] = ()) -> None:
        torch.manual_seed(0)
        self.sizes, self.rows, self.captures = sizes, rows, captures
        memory = ssd_memory(
            sizes.heads, sizes.head_dim, sizes.state, sizes.groups, 8, 2, "bfloat16", by=GPU
        )  # fmt: skip
        spec = MemorySpec((memory,))
        slots = [row.read_slot for row in rows if row.read_slot != NOWHERE] + [capture.slot for capture in captures]
        units = unit_bytes(spec)
        states = Store(spec, (1 + max(slots, default=0)) * units[Kind.STATE], "cuda")
        tails = Store(spec, (1 + max(row.tail for row in rows)) * units[Kind.TAIL], "cuda")
        self.view = RecurrentView(states.views[0].state, tails.views[0].tail)
        self.fill_memory()
        board = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.batch = build_batch(make_plan(rows, captures), spec, board, "cuda", GPU)
        self.inputs = self.make_inputs(self.batch.tokens)

    def fill_memory(self) -> None:
        tail = self.view.tail
        self.view.state["ssm"].normal_()
        tail["input"].normal_()
        tail["B"].normal_(std=self.sizes.state**-0.5)
        tail["dt"].fill_(0.05)
        ring = tail["decay"].shape[1]
        tail["decay"].copy_(-0.05 * torch.arange(1, ring + 1, device="cuda")[:, None])

    def make_inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return x, dt, A, B, C, D and the bias of dt, as slices of two projections, like in a layer."""
        sizes = self.sizes
        mixed = torch.randn(tokens, sizes.inner + 2 * sizes.keys, device="cuda", dtype=torch.bfloat16)
        x, B, C = mixed.split_with_sizes([sizes.inner, sizes.keys, sizes.keys], 1)
        B.mul_(sizes.state**-0.5)
        projected = torch.randn(tokens, 2 * sizes.inner + 2 * sizes.keys + sizes.heads, device="cuda").bfloat16()
        dt = projected[:, -sizes.heads :]
        A = -0.5 - 7.5 * torch.rand(sizes.heads, device="cuda")
        D = torch.randn(sizes.heads, device="cuda")
        bias = -4 * torch.rand(sizes.heads, device="cuda")
        x = x.view(-1, sizes.heads, sizes.head_dim)
        B, C = (keys.view(-1, sizes.groups, sizes.state) for keys in (B, C))
        return x, dt, A, B, C, D, bias

    @property
    def group(self) -> SsdInputs:
        x, dt, A, B, C, D, bias = self.inputs
        return SsdInputs(x, dt, A, B, C, D, bias)

    def run(self) -> torch.Tensor:
        x, dt, A, B, C, D, bias = self.inputs
        return ssd(x, dt, A, B, C, D, self.batch, self.view, bias, UNLIMITED)

    def decode_by(self, choice: DecodeChoice) -> None:
        y = torch.empty(self.inputs[0].shape, dtype=torch.bfloat16, device="cuda")
        decode(self.group, self.batch, self.view, y, choice)

    def extend_by(self, choice: CellsChoice) -> None:
        y = torch.empty(self.inputs[0].shape, dtype=torch.bfloat16, device="cuda")
        extend(self.group, self.batch, self.view, y, choice)

    def update_in_place(self, block: int = 64, warps: int = 4) -> None:
        x, dt, A, B, C, D, bias = self.inputs
        sizes, state = self.sizes, self.view.state["ssm"]
        y = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
        width = sizes.inner // sizes.groups
        in_place_kernel[(sizes.groups * triton.cdiv(width, block), len(x))](
            x, dt, A, B, C, D, bias, y, state, self.batch.slot,
            x.stride(0), dt.stride(0), B.stride(0), state.stride(0),
            GROUPS=sizes.groups, WIDTH=width, HEAD_DIM=sizes.head_dim, STATE=sizes.state, BLOCK=block, num_warps=warps,
        )  # fmt: skip

    def scan_of_mamba(self, chunk: int) -> None:
        """Run mamba_ssm on all tokens as one sequence; packing several would only make it slower."""
        x, dt, A, B, C, D, bias = self.inputs
        forward = mamba_forward()
        assert forward is not None
        x, dt, B, C = (tensor.unsqueeze(0) for tensor in (x, dt, B, C))
        forward(x, dt, A, B, C, chunk, D=D, dt_bias=bias, dt_softplus=True)


def mamba_forward() -> Callable[..., Any] | None:
    try:
        from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd
    except ImportError:
        return None
    return _mamba_chunk_scan_combined_fwd


@triton.jit
def in_place_kernel(
    x, dt, A, B, C, D, dt_bias, y, state, slots,
    x_stride, dt_stride, B_stride, slot_stride,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode in place, for comparison: read a state, advance it by one token and write it back."""
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) // CHUNKS
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    n = tl.arange(0, STATE)
    slot = tl.load(slots + row).to(tl.int64)
    at = state + slot * slot_stride + (group * STATE + n[:, None]) * WIDTH + column[None, :]
    values = tl.load(at, mask=real[None, :], other=0.0)
    head = group * (WIDTH // HEAD_DIM) + column // HEAD_DIM
    raw = tl.load(dt + row * dt_stride + head, mask=real, other=0.0).to(tl.float32)
    step = tl.log(1.0 + tl.exp(raw + tl.load(dt_bias + head, mask=real, other=0.0)))
    key = tl.load(B + row * B_stride + group * STATE + n).to(tl.float32)
    query = tl.load(C + row * B_stride + group * STATE + n).to(tl.float32)
    value = tl.load(x + row * x_stride + group * WIDTH + column, mask=real, other=0.0).to(tl.float32)
    values = values * tl.exp(step * tl.load(A + head, mask=real, other=0.0))[None, :]
    values += key[:, None] * (step * value)[None, :]
    tl.store(at, values, mask=real[None, :])
    result = tl.sum(values * query[:, None], 0) + value * tl.load(D + head, mask=real, other=0.0)
    tl.store(y + (row * GROUPS + group) * WIDTH + column, result.to(y.dtype.element_ty), mask=real)


def decodes(sizes: Sizes, rows: int) -> Layer:
    """Return a decode layer with tails that are half full on average; one row in 64 closes its cell."""
    planned = [Row(64 * 9 + 37 * row % 64, 64 * 9 + 37 * row % 64 + 1, row, row) for row in range(rows)]
    closing = [row for row, each in enumerate(planned) if each.end % 64 == 0]
    captures = [Capture(row, planned[row].end, rows + number) for number, row in enumerate(closing)]
    return Layer(sizes, planned, captures)


def prefill(sizes: Sizes, lengths: Sequence[int], start: int = 0) -> Layer:
    """Return a prefill layer that captures every 2,048 tokens and at the last grid position of every row."""
    rows = [Row(start, start + length, number, number) for number, length in enumerate(lengths)]
    wanted = [
        (number, position)
        for number, row in enumerate(rows)
        for position in range(start // 64 * 64 + 64, row.end + 1, 64)
        if position % 2048 == 0 or position > row.end - 64
    ]
    captures = [Capture(row, position, len(rows) + number) for number, (row, position) in enumerate(wanted)]
    return Layer(sizes, rows, captures)


PREFILLS = {"one row": (16384,), "3 rows": (5461, 5462, 5461)}


def cases() -> Iterator[Case]:
    for sizes in (NEMOTRON_NANO, GRANITE_SMALL, FALCON_7B):
        for rows in (1, 32, 128, 256):
            layers = [decodes(sizes, rows) for _ in range(LAYERS)]
            peers = {"in place": one_after_another([layer.update_in_place for layer in layers])}
            run, floor = one_after_another([layer.run for layer in layers]), LAYERS * rows * sizes.state_bytes
            yield f"decode, {sizes.name}, {rows} rows, {LAYERS} layers", run, floor, peers
    for sizes in (NEMOTRON_NANO, GRANITE_SMALL, FALCON_7B):
        for name, lengths in PREFILLS.items():
            layer = prefill(sizes, lengths, start=0 if len(lengths) == 1 else 64)
            peers = {"mamba_ssm": partial(layer.scan_of_mamba, 256)} if mamba_forward() else {}
            floor = sum(lengths) * sizes.token_bytes
            yield f"prefill, {sizes.name}, {sum(lengths)} tokens, {name}", layer.run, floor, peers


def choices_of_decode() -> list[DecodeChoice]:
    return [DecodeChoice(*each) for each in itertools.product((32, 64), (1, 2, 5, 10), (1, 2, 3), (2, 4, 8))]


def choices_of_cells() -> list[CellsChoice]:
    wide = itertools.product((64, 128), (2, 3), (4, 8))
    return [CellsChoice(*each) for each in (*wide, *itertools.product((16, 32, 64), (2, 3), (2,)))]


def try_choices(name: str, call: Callable[[Any], None], choices: Sequence[Any], floor_bytes: float) -> None:
    """Print the five best choices, and the error of those that fail."""
    found = []
    for choice in choices:
        try:
            found.append((seconds_of(recorded(partial(call, choice)), repeats=10), choice))
        except Exception as error:  # a choice may need too many registers or too much shared memory
            print(f"  {choice}: {str(error).splitlines()[-1][:100]}")
    floor = floor_bytes / copy_bandwidth()
    for seconds, choice in sorted(found)[:5]:
        print(f"  {name}: {seconds * 1e6:.1f} µs, {seconds / floor:.2f} of the floor: {choice}")


def main() -> int:
    for sizes in (NEMOTRON_NANO, GRANITE_SMALL, FALCON_7B):
        for rows in (1, 32, 128):
            layer = decodes(sizes, rows)
            name = f"decode, {sizes.name}, {rows} rows"
            try_choices(name, layer.decode_by, choices_of_decode(), rows * sizes.state_bytes)
        for name, lengths in PREFILLS.items():
            layer = prefill(sizes, lengths)
            floor = sum(lengths) * sizes.token_bytes
            try_choices(f"prefill, {sizes.name}, {name}", layer.extend_by, choices_of_cells(), floor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
