"""Gated delta rule: cases for `benchmarks.kernels`, at the sizes of Qwen3-Next and Qwen3.5.

    python -m benchmarks.kernels gated_delta
    python -m benchmarks.kernel_gated_delta             tries every choice of the kernels' shapes and prints the best

Compared with a decode that updates states in place, as engines with mutable states do; with flash-linear-attention, if
installed, on the same raw projections; and with FlashInfer's Hopper prefill, if compiled beforehand. The latter two
capture the last state only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.floors import copy_bandwidth, one_after_another, recorded, seconds_of
from tests.support.kernels.operations import GPU, gated_delta_memory, projected_gated_delta
from tests.support.kernels.plans import Capture, Row, make_plan
from weft.device.store import RecurrentView, Store
from weft.kernels.cuda.gated_delta import SOLVE, WALK, GatedDeltaLaunch, launch_decode, launch_extend
from weft.kernels.interface import Batch
from weft.kernels.recurrent import DeltaInputs
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.runner.batching import build_batch

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
KEYS, VALUES = KEY_HEADS * DIM, VALUE_HEADS * DIM
STATE_BYTES = VALUE_HEADS * DIM * DIM * 4
# Layers measured together, and tokens by which a tail may be rolled back.
LAYERS = 8
DRAFT_ROOM = 7
TOKEN_BYTES = (2 * KEYS + 2 * VALUES + 2 * VALUE_HEADS) * 2

Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]


class Layer:
    """One layer in bfloat16: memory, parameters, and the projections of a step's tokens."""

    def __init__(self, rows: Sequence[Row], captures: Sequence[Capture] = (), draft_room: int = 0) -> None:
        torch.manual_seed(0)
        memory = gated_delta_memory(KEY_HEADS, DIM, VALUE_HEADS, DIM, 2 * KEYS + VALUES, 4, "bfloat16", by=GPU)
        spec = MemorySpec((memory,), draft_room=draft_room)
        slots = 1 + max(*(row.read_slot for row in rows), *(capture.slot for capture in captures), 0)
        units = unit_bytes(spec)
        states, tails = (
            Store(spec, count * units[kind], "cuda") for kind, count in ((Kind.STATE, slots), (Kind.TAIL, len(rows)))
        )
        self.view = RecurrentView(states.views[0].state, tails.views[0].tail)
        self.view.state["delta"].normal_(std=0.1)
        self.view.tail["k"].normal_(std=DIM**-0.5)
        self.view.tail["u"].normal_()
        decay = self.view.tail["decay"]
        decay.copy_(-torch.arange(decay.shape[1], device="cuda")[:, None] * 0.1)
        board = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rows = rows
        self.batch: Batch = build_batch(make_plan(rows, captures), spec, board, "cuda", GPU)
        tokens = self.batch.tokens
        mixed = torch.randn(tokens, 2 * KEYS + VALUES, device="cuda", dtype=torch.bfloat16)
        query, key, value = mixed.split_with_sizes([KEYS, KEYS, VALUES], -1)
        gates = torch.randn(tokens, 2 * VALUE_HEADS, device="cuda", dtype=torch.bfloat16)
        self.inputs = DeltaInputs(
            query.view(tokens, KEY_HEADS, DIM),
            key.view(tokens, KEY_HEADS, DIM),
            value.view(tokens, VALUE_HEADS, DIM),
            gates[:, VALUE_HEADS:],
            gates[:, :VALUE_HEADS],
            -torch.rand(VALUE_HEADS, device="cuda") * 4 - 0.5,
            torch.rand(VALUE_HEADS, device="cuda") * 4 - 5,
        )

    def __call__(self) -> Tensor:
        i = self.inputs
        return projected_gated_delta(
            i.q, i.k, i.v, i.step, i.strength, i.rates, i.bias, self.batch, self.view
        )  # fmt: skip


def decode_layer(rows: int) -> Layer:
    """Return a decode layer with tails that are half full on average; one row in 64 closes its cell."""
    offsets = [(row * 37) % 64 for row in range(rows)]
    captures = [Capture(row, 640, rows + row) for row, offset in enumerate(offsets) if offset == 63]
    return Layer([Row(576 + o, 577 + o, row, row) for row, o in enumerate(offsets)], captures)


def drafts_layer(rows: int, lengths: Sequence[int]) -> Layer:
    """Return a layer that verifies drafts in rows of these lengths in turn, some of which end their cell."""
    offsets = [(row * 37) % 64 for row in range(rows)]
    spans = [(576 + offset, 576 + offset + lengths[row % len(lengths)]) for row, offset in enumerate(offsets)]
    captures = [Capture(row, 640, rows + row) for row, (_, end) in enumerate(spans) if end >= 640]
    return Layer([Row(*span, row, row) for row, span in enumerate(spans)], captures, DRAFT_ROOM)


def prefill_layer(lengths: Sequence[int]) -> Layer:
    """Return a layer whose rows resume at a checkpoint; captures every 2,048 tokens and at the last grid position."""
    rows = [Row(1024, 1024 + length, index, index) for index, length in enumerate(lengths)]
    wanted = [
        (index, position)
        for index, row in enumerate(rows)
        for position in sorted({*range(2048, row.end, 2048), row.end // 64 * 64})
    ]
    return Layer(rows, [Capture(index, p, len(rows) + number) for number, (index, p) in enumerate(wanted)])


def cases() -> Iterator[Case]:
    for rows in (32, 128, 256):
        layers = [decode_layer(rows) for _ in range(LAYERS)]
        peers = {"in place": one_after_another([in_place(layer) for layer in layers])}
        yield f"decode, {rows} rows, {LAYERS} layers", one_after_another(layers), LAYERS * rows * STATE_BYTES, peers
    for rows, lengths in itertools.product((1, 8, 16, 32, 128), ((4,), (2, 6, 3, 5), (8,))):
        layers = [drafts_layer(rows, lengths) for _ in range(LAYERS)]
        name = f"verification, {rows} rows of {', '.join(map(str, lengths))} tokens, {LAYERS} layers"
        yield name, one_after_another(layers), LAYERS * rows * STATE_BYTES, {}
    for lengths in ((5461, 6000, 4923), (8192,), (16384,)):
        layer = prefill_layer(lengths)
        states = len(lengths) + int((layer.batch.piece_slot >= 0).sum())
        floor = sum(lengths) * TOKEN_BYTES + states * STATE_BYTES
        fla = flash_linear_attention(layer)
        name = "prefill, " + " + ".join(map(str, lengths)) + " tokens"
        yield name, layer, floor, ({"FLA": fla} if fla else {}) | flashinfer(layer)


@triton.jit
def update_in_place(
    q, k, token_stride, v, value_stride, step, strength, gate_stride, rates, bias, y, state, row_slot,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode one token per row, program (block of value columns, value head, row): reads and writes the whole state."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane, value = tl.arange(0, DIM), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (tl.load(row_slot + row).to(tl.int64) * HEADS + head) * (DIM * DIM) + lane[:, None] * DIM + value[None, :]
    memory = tl.load(state + at)
    source = row * token_stride + head // SHARED * DIM + lane
    key, query = tl.load(k + source).to(tl.float32), tl.load(q + source).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (DIM**-0.5)
    raw = tl.load(step + row * gate_stride + head).to(tl.float32) + tl.load(bias + head)
    memory *= tl.exp(tl.log(1.0 + tl.exp(raw)) * tl.load(rates + head))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(strength + row * gate_stride + head).to(tl.float32)))
    values = tl.load(v + row * value_stride + head * DIM + value).to(tl.float32)
    u = beta * (values - tl.sum(memory * key[:, None], 0))
    memory += key[:, None] * u[None, :]
    tl.store(state + at, memory)
    tl.store(y + (row * HEADS + head) * DIM + value, tl.sum(memory * query[:, None], 0).to(y.dtype.element_ty))


# The fastest of the choices that `main` tries.
IN_PLACE = (64, 4)


def in_place(layer: Layer, choice: tuple[int, int] = IN_PLACE) -> Callable[[], Tensor]:
    """Return a decode as engines with mutable states do it, on its own contiguous states."""
    inputs, batch, (columns, warps) = layer.inputs, layer.batch, choice
    state = torch.randn(batch.rows, VALUE_HEADS, DIM, DIM, device="cuda") * 0.1
    slots = torch.randperm(batch.rows, device="cuda").int()

    def call() -> Tensor:
        y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device="cuda")
        update_in_place[(DIM // columns, VALUE_HEADS, batch.rows)](
            inputs.q, inputs.k, inputs.q.stride(0), inputs.v, inputs.v.stride(0), inputs.step, inputs.strength,
            inputs.step.stride(0), inputs.rates, inputs.bias, y, state, slots,
            HEADS=VALUE_HEADS, SHARED=VALUE_HEADS // KEY_HEADS, DIM=DIM, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
        return y

    return call


def flash_linear_attention(layer: Layer) -> Callable[[], Any] | None:
    """Return a call of its chunked rule on the same rows and initial states, with its fused norms and gates."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    inputs = layer.inputs
    packed = [x.contiguous()[None] for x in (inputs.q, inputs.k, inputs.v, inputs.step, inputs.strength)]
    bounds = layer.batch.host_first.long()
    bounds_here = bounds.cuda()
    state = layer.view.state["delta"][: len(layer.rows)].contiguous()
    logarithm = (-inputs.rates).log()

    def call() -> Any:
        with torch.no_grad():
            return chunk_gated_delta_rule(
                *packed, initial_state=state, output_final_state=True, cu_seqlens=bounds_here, cu_seqlens_cpu=bounds,
                use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
                A_log=logarithm, dt_bias=inputs.bias,
            )  # fmt: skip

    return call


@triton.jit
def prepare(
    q, k, token_stride, step, strength, gate_stride, rates, bias, unit_q, unit_k, alpha, beta,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Compute FlashInfer's inputs, program (token): normalised q and k, decay factors alpha, correction rates beta."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, KEY_HEADS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    source, target = token * token_stride + feature, token * (KEY_HEADS * DIM) + feature
    query, key = tl.load(q + source).to(tl.float32), tl.load(k + source).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 1) + 1e-6)[:, None]
    key *= tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
    tl.store(unit_q + target, query.to(unit_q.dtype.element_ty))
    tl.store(unit_k + target, key.to(unit_k.dtype.element_ty))
    head = tl.arange(0, VALUE_HEADS)
    raw = tl.load(step + token * gate_stride + head).to(tl.float32) + tl.load(bias + head)
    tl.store(alpha + token * VALUE_HEADS + head, tl.exp(tl.log(1.0 + tl.exp(raw)) * tl.load(rates + head)))
    strengths = tl.load(strength + token * gate_stride + head).to(tl.float32)
    tl.store(beta + token * VALUE_HEADS + head, 1.0 / (1.0 + tl.exp(-strengths)))


def flashinfer(layer: Layer) -> dict[str, Callable[[], Any]]:
    """Return calls of its Hopper kernel on the same rows and initial states: with and without `prepare`.

    The kernel computes neither norms nor gates, so `prepare` does. Empty if the kernel is not compiled yet, because
    compiling takes minutes.
    """
    try:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
        from flashinfer.jit.gdn import gen_gdn_prefill_sm90_module
    except ImportError:
        return {}
    if not gen_gdn_prefill_sm90_module().is_compiled:
        return {}
    inputs, bounds = layer.inputs, layer.batch.host_first.long().cuda()
    values, tokens = inputs.v.contiguous(), len(inputs.v)
    unit_q, unit_k = torch.empty(2, *inputs.k.shape, dtype=values.dtype, device="cuda")
    alpha, beta = torch.empty(2, tokens, VALUE_HEADS, device="cuda")
    # FlashInfer expects and returns states with the key dimension last.
    state = layer.view.state["delta"][: len(layer.rows)].transpose(-1, -2).contiguous()

    def fill() -> None:
        prepare[(tokens,)](
            inputs.q, inputs.k, inputs.q.stride(0), inputs.step, inputs.strength, inputs.step.stride(0), inputs.rates,
            inputs.bias, unit_q, unit_k, alpha, beta, KEY_HEADS=KEY_HEADS, VALUE_HEADS=VALUE_HEADS, DIM=DIM,
        )  # fmt: skip

    def alone() -> Any:
        return chunk_gated_delta_rule(
            unit_q, unit_k, values, alpha, beta, initial_state=state, output_final_state=True, cu_seqlens=bounds
        )

    fill()
    return {"FlashInfer": one_after_another([fill, alone]), "FlashInfer without norms and gates": alone}


def timed(call: Callable[[], Any]) -> float | str:
    """Return microseconds, or the error message."""
    try:
        return seconds_of(recorded(call), repeats=11) * 1e6
    except Exception as error:  # report a choice that does not fit
        torch.cuda.synchronize()
        return str(error).strip().splitlines()[-1][-90:]


def show(title: str, found: dict[Any, float | str]) -> None:
    print(title)
    for choice, micros in sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])):
        print(f"    {micros if isinstance(micros, str) else format(micros, '8.1f')}  {tuple(choice)}", flush=True)


def tune_decode(choices: Sequence[GatedDeltaLaunch], batches: Sequence[int]) -> None:
    for rows in batches:
        layer = decode_layer(rows)
        y = torch.empty(layer.inputs.v.shape, dtype=torch.bfloat16, device="cuda")
        floor = rows * STATE_BYTES / copy_bandwidth() * 1e6
        show(
            f"decode, {rows} rows, floor {floor:.1f}",
            {c: timed(partial(launch_decode, layer.inputs, layer.batch, layer.view, y, c)) for c in choices},
        )
        show("  in place", {c: timed(in_place(layer, c)) for c in itertools.product((32, 64, 128), (2, 4, 8))})


def tune_prefill(choices: Sequence[tuple[GatedDeltaLaunch, GatedDeltaLaunch]], lengths: Sequence[int]) -> None:
    layer = prefill_layer(lengths)
    y = torch.empty(layer.inputs.v.shape, dtype=torch.bfloat16, device="cuda")
    show(
        f"prefill, rows of {tuple(lengths)}: solve, walk",
        {c: timed(partial(launch_extend, layer.inputs, layer.batch, layer.view, y, *c)) for c in choices},
    )


def main() -> None:
    print(f"copy {copy_bandwidth() / 1e12:.2f} TB/s")
    decodes = [GatedDeltaLaunch(v, w, 1, r) for v in (16, 32, 64, 128) for w in (1, 2, 4) for r in (None, 128)]
    tune_decode(decodes, (32, 128))
    solves = [GatedDeltaLaunch(0, 4, 1, registers) for registers in (None, 168, 128)]
    # One stage is not tried: it gave wrong results for 16-bit matmuls (Triton 3.6).
    walks = [GatedDeltaLaunch(v, w, s) for v in (16, 32, 64) for w in (4, 8) for s in (2, 3, 4)]
    pairs = [(solve, WALK) for solve in solves] + [(SOLVE, walk) for walk in walks]
    for lengths in ((5461, 6000, 4923), (8192,)):
        tune_prefill(pairs, lengths)


if __name__ == "__main__":
    main()
