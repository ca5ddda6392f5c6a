"""Convolutions, norms, rotations and activations: cases for `benchmarks.kernels`, compared with plain torch operations.

python -m benchmarks.kernel_pointwise       tries block sizes; the best are kept in weft/kernels/cuda/*.py
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.floors import copy_bandwidth, recorded, seconds_of
from tests.support.kernels.operations import GPU, causal_conv, gated_short_conv
from weft.device.store import AttentionView, RecurrentView, Store
from weft.kernels.interface import Batch, PageList
from weft.kernels.plain.norm import rms_norm as rms_norm_heads
from weft.kernels.plain.rotary import rotate
from weft.kernels.recurrent import short_conv_memory
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Change
from weft.memory.spec import AttentionMemory, MemorySpec

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]
Call = Callable[[], Any]

DEVICE, DTYPE, CELL, EPS = "cuda", torch.bfloat16, 64, 1e-5
ITEM = DTYPE.itemsize
PREFILL, DECODES = 8192, (1, 32, 128)
# Launches per graph, for kernels that are too short to be timed alone.
CHAIN = 50


def cases() -> Iterator[Case]:
    for tokens in (PREFILL, 32):
        yield conv(tokens, 2048, 3, gated=True)
        yield conv(tokens, 12288, 4, gated=False)
        yield norm(tokens, 4480)
        yield gated_norm(tokens, (10240,), 8, gate_first=True)
        yield gated_norm(tokens, (32, 128), 1, gate_first=False)
        yield rotation(tokens, 32, 8, 64, normed=True)
        yield rotation(tokens, 16, 8, 256, normed=True)
        yield activation(tokens, 8192)
        yield squares(tokens, 15680)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def batch_of(tokens: int) -> Batch:
    """Return a batch of decodes at position 100, or of one long row from position 64 for 1,024 tokens or more."""
    rows, start, decode = (tokens, 100, True) if tokens < 1024 else (1, CELL, False)
    pieces = 0 if decode else tokens // CELL
    every = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE)
    first = every if decode else ints(0, tokens)
    positions = torch.full_like(every[1:], start) if decode else start + every[:-1]
    pages = every[:-1] if decode else every[:-1] // CELL
    listed = PageList(pages, first, first, pages, first.cpu(), first.cpu())
    return Batch(
        operations=GPU, tokens=tokens, rows=rows, decodes=rows if decode else 0, pieces=pieces, most_pieces=pieces,
        longest=tokens // rows, farthest=start + tokens // rows, cell=CELL, token_ids=positions, positions=positions,
        start=torch.full((rows,), start, dtype=torch.int32, device=DEVICE),
        first=first, slot=every[:rows], tail=every[:rows], closing=torch.full_like(every[:rows], -1),
        piece_row=torch.zeros_like(every[:pieces]), piece_position=start + every[:pieces] * CELL,
        piece_slot=torch.full_like(every[:pieces], -1), first_piece=ints(0, pieces), full=listed, windowed=None,
        host_start=first.cpu(), host_first=first.cpu(), host=None,
    )  # fmt: skip


def conv(tokens: int, channels: int, width: int, gated: bool) -> Case:
    spec = MemorySpec((short_conv_memory(channels, width, "bfloat16"),), cell=CELL)
    units = tokens if tokens < 1024 else 1
    store = Store(spec, (units + 1) * max(spec.state_bytes, spec.tail_bytes), DEVICE)
    view = store.views[0]
    assert isinstance(view, RecurrentView)
    batch, projected = batch_of(tokens), random(tokens, 3 * channels)
    weight = torch.randn(width, channels, device=DEVICE).t()
    before, after, x = projected.chunk(3, -1)
    taps = weight.to(DTYPE).unsqueeze(1).contiguous()

    def call() -> Tensor:
        if gated:
            return gated_short_conv(projected, weight, None, batch, view)
        return causal_conv(x, weight, None, True, batch, view)

    def plain() -> Tensor:
        inputs = before * x if gated else x
        line = F.pad(inputs.t().unsqueeze(0), (width - 1, 0))
        y = F.conv1d(line, taps, groups=channels)[0].t()
        return after * y if gated else F.silu(y)

    moved = tokens * channels * ITEM * (4 if gated else 2) + 4 * width * channels
    if tokens < 1024:
        moved += tokens * channels * ITEM * width
    name = f"{'gated short' if gated else 'causal'} conv, {tokens} x {channels}"
    return name, call, moved, {"torch": plain} if tokens >= 1024 else {}


def norm(tokens: int, size: int) -> Case:
    from weft.kernels.cuda.norm.norms import join

    x, change, weight = random(tokens, size), random(tokens, size), random(size)

    def plain() -> Tensor:
        return F.rms_norm(x + change, (size,), weight, EPS)

    call: Call = lambda: join(x, [Change(change)], weight, EPS)  # noqa: E731
    return f"addition and norm, {tokens} x {size}", call, 4 * tokens * size * ITEM, {"torch": plain}


def gated_norm(tokens: int, shape: tuple[int, ...], groups: int, gate_first: bool) -> Case:
    x, weight = random(tokens, *shape), random(shape[-1])
    # A slice of a wider projection, as in a model.
    gate = random(tokens, 2 * x[0].numel())[:, : x[0].numel()].unflatten(-1, shape)

    def plain() -> Tensor:
        y = x * F.silu(gate) if gate_first else x
        parts = y.unflatten(-1, (groups, -1))
        y = F.rms_norm(parts, parts.shape[-1:], None, EPS).flatten(-2) * weight
        return y if gate_first else y * F.silu(gate)

    call: Call = lambda: GPU.gated_rms_norm(x, gate, weight, EPS, groups, gate_first, None)  # noqa: E731
    name = f"gated norm, {tokens} x {' x '.join(map(str, shape))}"
    return name, call, 3 * x.numel() * ITEM, {"torch": plain}


def rotation(tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool) -> Case:
    from weft.kernels.cuda.rotary import make_rotation, rotate_and_write

    spec = MemorySpec((AttentionMemory(kv_heads, head_dim, "bfloat16"),), cell=CELL)
    batch = batch_of(tokens)
    store = Store(spec, max(tokens // CELL, min(tokens, 1024)) * spec.page_bytes, DEVICE)
    view = store.views[0]
    assert isinstance(view, AttentionView)
    projected = random(tokens, heads + 2 * kv_heads, head_dim)
    weight = random(heads + kv_heads, head_dim) if normed else None
    turn: Rotation = make_rotation(batch.positions, torch.rand(head_dim // 2, device=DEVICE), 1.0, DTYPE)
    place = batch.positions.long() % CELL

    def plain() -> Tensor:
        both = projected[:, : heads + kv_heads]
        both = rotate(both if weight is None else rms_norm_heads(both, weight, EPS), turn)
        page = batch.pages(None).write_page
        view.keys[page, place] = both[:, heads:]
        view.values[page, place] = projected[:, heads + kv_heads :]
        return both[:, :heads]

    call: Call = lambda: rotate_and_write(projected, heads, weight, EPS, turn, batch, view)  # noqa: E731
    name = f"norm, rotation and pages, {tokens} x {heads} + {kv_heads} x {head_dim}"
    return name, call, 2 * projected.numel() * ITEM, {"torch": plain}


def activation(tokens: int, size: int) -> Case:
    gate, up = random(tokens, 2 * size).chunk(2, -1)
    call: Call = lambda: GPU.gated_product(gate, up, F.silu)  # noqa: E731
    return f"SiLU of a gate, {tokens} x {size}", call, 3 * tokens * size * ITEM, {"torch": lambda: F.silu(gate) * up}


def squares(tokens: int, size: int) -> Case:
    from weft.kernels.activations import squared_relu
    from weft.kernels.cuda.activation import activate

    x = random(tokens, size)
    call: Call = lambda: activate("relu2", x)  # noqa: E731
    return f"squared ReLU, {tokens} x {size}", call, 2 * x.numel() * ITEM, {"torch": lambda: squared_relu(x)}


def tune(limit_seconds: float = 50.0) -> None:
    """Time every block size of every kernel at decode and prefill sizes; print the fastest first."""
    from weft.kernels.cuda import activation as activations
    from weft.kernels.cuda import rotary as rotaries
    from weft.kernels.cuda.causal_conv import convolution as convs
    from weft.kernels.cuda.norm import norms

    began = time.perf_counter()
    trials: list[tuple[Any, dict[str, list[Any]], list[Callable[[int], Case]]]] = [
        (convs, {"CHANNELS": [256, 512], "WARPS": [1, 2], "SPLITS": [2, 4, 8]}, [
            lambda n: conv(n, 2048, 3, True), lambda n: conv(n, 12288, 4, False)]),
        (activations, {"LOADED": [1024, 2048, 4096], "WARPS": [4, 8]}, [lambda n: squares(n, 15680)]),
        (norms, {"GATED_PER_WARP": [256, 512, 1024], "TILE": [512, 1024]}, [
            lambda n: gated_norm(n, (10240,), 8, True), lambda n: gated_norm(n, (32, 128), 1, False)]),
        (activations, {"LOADED": [1024, 2048, 4096], "WARPS": [4, 8]}, [lambda n: activation(n, 8192)]),
        (norms, {"PER_WARP": [128, 256, 512]}, [lambda n: norm(n, 2048), lambda n: norm(n, 4480)]),
        (convs, {"FEW_CHANNELS": [64, 128, 256], "FEW_WARPS": [1, 2]}, [lambda n: conv(n, 2048, 3, True)]),
        (rotaries, {"STEP_TILE": rotary_tiles((1, 2))}, [lambda n: rotation(n, 32, 8, 64, True)]),
        (rotaries, {"DECODE_TILE": rotary_tiles((2, 4))}, [lambda n: rotation(n, 32, 8, 64, True)]),
    ]  # fmt: skip
    for module, choices, makers in trials:
        decoding = any(name.startswith(("DECODE", "FEW")) for name in choices)
        extending = module in (convs, rotaries)
        for make in makers:
            sizes = DECODES if decoding else (PREFILL,) if extending else (*DECODES, PREFILL)
            report(module, choices, [make(n) for n in sizes], sizes)
            if time.perf_counter() - began > limit_seconds:
                print(f"stopped at the limit of {limit_seconds:.0f} s")
                return


def rotary_tiles(warps: Sequence[int]) -> list[Any]:
    from weft.kernels.cuda.rotary import RotaryTile

    return [RotaryTile(*pair) for pair in itertools.product((512, 1024, 2048), warps)]


def report(module: Any, choices: dict[str, list[Any]], own_cases: list[Case], sizes: Sequence[int]) -> None:
    kept = {name: getattr(module, name) for name in choices}
    lines = []
    for values in itertools.product(*choices.values()):
        for name, value in zip(choices, values):
            setattr(module, name, value)
        try:
            times = [time_of(case[1], n) for case, n in zip(own_cases, sizes)]
            figures = "  ".join(f"{n}: {t * 1e6:.2f} µs" for n, t in zip(sizes, times))
            lines.append((times[-1], f"    {dict(zip(choices, values))}  {figures}"))
        except Exception as error:  # a size that does not compile must not stop the others
            lines.append((float("inf"), f"    {dict(zip(choices, values))}  {str(error).splitlines()[-1][-120:]}"))
    for name, value in kept.items():
        setattr(module, name, value)
    floor = own_cases[-1][2] / copy_bandwidth()
    print(f"{module.__name__.rpartition('.')[2]}: {own_cases[-1][0]}, floor {floor * 1e6:.2f} µs, kept {kept}")
    print("\n".join(line for _, line in sorted(lines)))


def time_of(call: Call, tokens: int) -> float:
    """Return the seconds of a call: in a chain with warm caches, as in a decode step, or alone with cold ones."""
    if tokens >= 1024:
        return seconds_of(call, repeats=10)

    def chain() -> None:
        for _ in range(CHAIN):
            call()

    return seconds_of(recorded(chain), repeats=10, flush=False) / CHAIN


if __name__ == "__main__":
    sys.exit(tune())
