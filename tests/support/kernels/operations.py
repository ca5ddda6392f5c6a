"""Tables of operations for tests, and operations called with what they compute on, one by one."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from weft.device.store import AttentionView, RecurrentView
from weft.kernels.activations import Function
from weft.kernels.attention import AttentionForm, AttentionInputs
from weft.kernels.choosing import DECODES, GROUPS, assemble, everywhere
from weft.kernels.experts import Activation, ExpertWeights, SharedExpert
from weft.kernels.formats.stored import Stored
from weft.kernels.interface import Batch
from weft.kernels.native.layouts import DENSE_AND_PANELS
from weft.kernels.recurrent import UNLIMITED, ConvolutionWeights, DeltaInputs, DeltaShape, SsdInputs, SsdShape
from weft.kernels.stream import Normed
from weft.kernels.weight import Weight
from weft.memory.spec import RecurrentMemory

PLAIN = everywhere("plain")
CPU = everywhere("cpu")
NATIVE = assemble({group: "native" if group in DECODES else "cpu" for group in GROUPS})
# The kernels of a GPU for what walks over rows, interpreted; all else is quicker without them.
# Without Triton (it exists for Linux only) tests of other packages still run.
CUDA = "cuda" if find_spec("triton") is not None else "plain"
GPU_ROWS = assemble({group: CUDA if group in DECODES or group == "following" else "cpu" for group in GROUPS})
GPU = everywhere(CUDA)

# For layers that ask a step for nothing but its operations.
NOTHING = torch.zeros(0, dtype=torch.int32)
ON_CPU = Batch(
    CPU, *(0,) * 7, cell=64, full=None, windowed=None, host=None,
    **dict.fromkeys(("token_ids", "positions", "start", "first", "slot", "tail", "closing"), NOTHING),
    **dict.fromkeys(("piece_row", "piece_position", "piece_slot", "first_piece", "host_start", "host_first"), NOTHING),
)  # fmt: skip


def ssd_memory(
    heads: int, head_dim: int, state: int, groups: int, channels: int, width: int, dtype: str, by=CPU
) -> RecurrentMemory:
    return by.ssd_memory(SsdShape(heads, head_dim, state, groups, channels, width), dtype)


def gated_delta_memory(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int, channels: int, width: int, dtype: str, by=CPU
) -> RecurrentMemory:
    return by.gated_delta_memory(DeltaShape(key_heads, key_dim, value_heads, value_dim, channels, width), dtype)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    batch: Batch,
    view: RecurrentView,
    dt_bias: Tensor | None = None,
    limit: tuple[float, float] = UNLIMITED,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return batch.operations.ssd(SsdInputs(x, dt, A, B, C, D, dt_bias, limit, gate), batch, view, out)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, view: RecurrentView) -> Tensor:
    return batch.operations.gated_delta(DeltaInputs(*of_one_tensor(q, k), v, g, beta), batch, view)


def projected_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    strength: Tensor,
    rates: Tensor,
    bias: Tensor,
    batch: Batch,
    view: RecurrentView,
    most: float = 1.0,
) -> Tensor:
    return batch.operations.gated_delta(
        DeltaInputs(*of_one_tensor(q, k), v, step, strength, rates, bias, most), batch, view
    )


def of_one_tensor(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys as parts of one tensor, as projections give them: kernels may address both from one."""
    if q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return q, k
    both = torch.cat([q, k], 1)
    return both[:, : q.shape[1]], both[:, q.shape[1] :]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, batch: Batch, view: RecurrentView
) -> Tensor:
    return batch.operations.causal_conv(x, ConvolutionWeights(weight, bias, activation), batch, view)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    view: AttentionView,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    heads, head_dim = q.shape[1:]
    form = AttentionForm(heads, k.shape[1], head_dim, scale, view.window, softcap)
    flat = None if out is None else out.flatten(1)
    projected = torch.cat((q, k, v), 1).flatten(1)
    mixed = batch.operations.attend(AttentionInputs(projected, form, sinks=sinks), batch, view, flat)
    return mixed.unflatten(1, (heads, head_dim))


def gated_short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch, view: RecurrentView
) -> Tensor:
    """The convolution of what a projection has left."""
    if batch.operations in (GPU_ROWS, GPU):
        from weft.kernels.cuda.causal_conv.convolution import Gates
        from weft.kernels.cuda.causal_conv.convolution import causal_conv as convolve

        before, after, value = projected.chunk(3, dim=-1)
        return convolve(value, ConvolutionWeights(weight, bias), batch, view, Gates(before, after))
    # A projection by the identity leaves it as it is.
    identity = torch.eye(projected.shape[1], dtype=projected.dtype, device=projected.device)
    return projected_short_conv(projected, identity, None, None, weight, bias, batch, view)


def projected_short_conv(
    x: Normed,
    projection: Tensor,
    projection_bias: Tensor | None,
    stored: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    batch: Batch,
    view: RecurrentView,
) -> Tensor:
    weights = ConvolutionWeights(weight, bias)
    return batch.operations.short_conv(x, weight_of(projection, projection_bias, stored), weights, batch, view)


def weight_of(matrix: Tensor, bias: Tensor | None, panels: Tensor | None) -> Weight:
    """Return a weight of plain numbers, beside panels of them if there are any."""
    if panels is None:
        return Weight.of(matrix, bias)
    return Weight((Stored(DENSE_AND_PANELS, (matrix, panels), *matrix.shape),), bias)


def linear(x: Normed, weight: Tensor, bias: Tensor | None = None, stored: Tensor | None = None, by=CPU) -> Tensor:
    return by.linear(x, weight_of(weight, bias, stored))


def activated_linear(
    x: Normed,
    weight: Tensor,
    bias: Tensor | None,
    activation: Function,
    parts: int = 1,
    stored: Tensor | None = None,
    by=CPU,
) -> Tensor:
    return by.activated_linear(x, weight_of(weight, bias, stored), activation, parts)


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    shared: SharedExpert | None = None,
    by=CPU,
) -> Tensor:
    layer = ExpertWeights.of(first, second, activation, first_bias, second_bias)
    return by.experts(x, (weights, chosen), layer, shared)
