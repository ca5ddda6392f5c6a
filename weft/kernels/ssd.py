"""The state space recurrence of Mamba2 (scalar decay per head), in extend form on the grid.

For each head, with B and C shared by the heads of a group:

    S = exp(dt A) S + dt B x^T        y = C S + D x

and then y may be gated. Whatever the model's dtype, all of the recurrence is computed and remembered in float32. A
state lies as [groups, state, heads of a group * head_dim], so that reading it is one product of C with contiguous
memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.activation import gated_product
from weft.kernels.batch import Batch, Decodes, Group, OpenCell, Rank
from weft.kernels.causal_conv import conv_parts
from weft.kernels.cells import (
    append,
    append_all,
    first_states,
    gather,
    hand_out,
    open_cells,
    opened,
    outputs_only,
    spread,
    total_of_one,
    totals,
    totals_of_all,
    with_tail,
    write_tail,
)
from weft.kernels.lanes import built_on_gpu
from weft.kernels.native.ssd import ssd as scan_natively
from weft.kernels.placing import placed
from weft.memory.device.store import RecurrentView
from weft.memory.spec import Part, RecurrentMemory

# Bounds of a time step that has none.
UNLIMITED = (0.0, math.inf)


def ssd_memory(
    heads: int,
    head_dim: int,
    state: int,
    groups: int,
    conv_channels: int,
    conv_width: int,
    dtype: str,
    lanes: bool | None = None,
) -> RecurrentMemory:
    """What a Mamba2 layer remembers. A token leaves its input dt x, B and the log decay since its cell's start.

    A tail is read head by head, and lies so. `lanes`: for kernels of a GPU, which keep x and B as they come, in
    `dtype`, and dt beside them; by default, where parameters are made on one. Where these kernels cannot be had, the
    reference uses that memory in its own way.
    """
    lanes = built_on_gpu() if lanes is None else lanes
    window, conv_input = conv_parts(conv_channels, conv_width, dtype)
    matrix = Part("ssm", (groups, state, heads // groups * head_dim), "float32")
    kind = dtype if lanes else "float32"
    inputs, keys = Part("input", (heads, head_dim), kind, apart=1), Part("B", (groups, state), kind, apart=1)
    tail = (conv_input, inputs, keys, Part("decay", (heads,), "float32", apart=1))
    if lanes:
        tail = (*tail, Part("dt", (heads,), "float32", apart=1))
    return RecurrentMemory((window, matrix), tail, conv_width)


def ssd(
    x: Float[Tensor, "tokens heads head_dim"],
    dt: Float[Tensor, "tokens heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "tokens groups state"],
    C: Float[Tensor, "tokens groups state"],
    D: Float[Tensor, " heads"] | None,
    batch: Batch,
    view: RecurrentView,
    dt_bias: Float[Tensor, " heads"] | None = None,
    limit: tuple[float, float] = UNLIMITED,
    gate: Float[Tensor, "tokens inner"] | None = None,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """`A` is negative, `dt` positive, both float32. With `dt_bias`, dt = softplus(dt + dt_bias) within `limit`.

    With `gate`, silu(gate) * y comes out. `out`, if given, is filled and returned; its tokens may lie apart.
    """
    inputs = (x, dt, A, B, C, D, dt_bias, limit, batch, view)
    if batch.lanes is not None and not batch.lanes.native:
        from weft.kernels.cuda.ssd import ssd as on_lanes

        return on_lanes(*inputs, gate, out)
    y = scan(*inputs) if batch.lanes is None else scan_natively(*inputs)
    if gate is None:
        return placed(y, out)
    return gated_product(gate, y.flatten(-2), F.silu, None if out is None else out.flatten(-2)).view_as(y)


def scan(
    x: Float[Tensor, "tokens heads head_dim"],
    dt: Float[Tensor, "tokens heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "tokens groups state"],
    C: Float[Tensor, "tokens groups state"],
    D: Float[Tensor, " heads"] | None,
    dt_bias: Float[Tensor, " heads"] | None,
    limit: tuple[float, float],
    batch: Batch,
    view: RecurrentView,
) -> Float[Tensor, "tokens heads head_dim"]:
    if dt_bias is not None:
        dt = time_step(dt, dt_bias, limit)
    steps = dt * A
    dtx = x * dt.unsqueeze(-1)
    B, C = B.float(), C.float()
    count = batch.decode_rows
    if not batch.groups:
        y = decode(dtx, steps, B, C, batch.decodes, view)
    else:
        y = torch.empty_like(dtx)
        if batch.decodes is not None:
            y[:count] = decode(dtx[:count], steps[:count], B[:count], C[:count], batch.decodes, view)
        for group in batch.groups:
            extend(dtx, steps, B, C, y, group, view)
    if D is not None:
        y.addcmul_(x, D.unsqueeze(-1))
    return y.to(x.dtype)


def time_step(
    raw: Float[Tensor, "tokens heads"], bias: Float[Tensor, " heads"], limit: tuple[float, float]
) -> Float[Tensor, "tokens heads"]:
    step = F.softplus(raw.float() + bias)
    return step if limit == UNLIMITED else step.clamp(*limit)


def decode(
    dtx: Float[Tensor, "rows heads head_dim"],
    steps: Float[Tensor, "rows heads"],
    B: Float[Tensor, "rows groups state"],
    C: Float[Tensor, "rows groups state"],
    decodes: Decodes,
    view: RecurrentView,
) -> Float[Tensor, "rows heads head_dim"]:
    """One token a row: y = exp(total) C S + sum over the cell of exp(total - total_j) (C B_j) dt_j x_j."""
    if decodes.rows == 1:
        y = decode_one(dtx[0], steps[0], B[0], C[0], decodes.cells[0], view).unsqueeze(0)
    else:
        y = decode_all(dtx, steps, B, C, decodes, view)
    for row, slot in decodes.captures:
        cell = decodes.cells[row]
        parts = (view.tail[name] for name in ("input", "B", "decay"))
        inputs, keys, total = (opened(part, cell, cell.offset + 1)[None].float() for part in parts)
        before = None if cell.slot is None else view.state["ssm"][cell.slot].unsqueeze(0)
        view.state["ssm"][slot] = advance(before, inputs, keys, total)[0]
    return y


def decode_one(
    dtx: Float[Tensor, "heads head_dim"],
    step: Float[Tensor, " heads"],
    B: Float[Tensor, "groups state"],
    C: Float[Tensor, "groups state"],
    cell: OpenCell,
    view: RecurrentView,
) -> Float[Tensor, "heads head_dim"]:
    """A row by itself needs no index: everything is a view."""
    total = total_of_one(view.tail["decay"], cell, step)
    since = torch.sub(total, append(view.tail["decay"], cell, total)).exp_()
    keys, inputs = append(view.tail["B"], cell, B).float(), append(view.tail["input"], cell, dtx).float()
    query = C.unsqueeze(1)
    scores = torch.bmm(query, keys.permute(1, 2, 0))
    weights = since.t().view(len(C), -1, len(since)) * scores
    y = torch.bmm(weights.contiguous().view(len(dtx), 1, -1), inputs.transpose(0, 1)).view(dtx.shape)
    if cell.slot is None:
        return y
    return y.addcmul_(torch.bmm(query, view.state["ssm"][cell.slot]).view(dtx.shape), total.exp().unsqueeze(-1))


def decode_all(
    dtx: Float[Tensor, "rows heads head_dim"],
    steps: Float[Tensor, "rows heads"],
    B: Float[Tensor, "rows groups state"],
    C: Float[Tensor, "rows groups state"],
    decodes: Decodes,
    view: RecurrentView,
) -> Float[Tensor, "rows heads head_dim"]:
    """Small things for all rows at once, then row by row what would cost more to gather than to read."""
    total = totals_of_all(view.tail["decay"], decodes, steps)
    for name, values in (("input", dtx), ("B", B), ("decay", total)):
        append_all(view.tail[name], decodes, values.to(view.tail[name].dtype))
    since = torch.sub(total.unsqueeze(1), open_cells(view.tail["decay"], decodes)).exp_()
    scores = open_cells(view.tail["B"], decodes).float().transpose(1, 2) @ C.unsqueeze(-1)
    rows, heads, groups = *steps.shape, B.shape[1]
    weights = since.view(rows, -1, groups, heads // groups).permute(0, 2, 3, 1) * scores.transpose(2, 3)
    weights = weights.contiguous().view(rows, heads, 1, -1)
    y = torch.empty_like(dtx).unsqueeze(2)
    earlier = y.new_zeros(rows, groups, 1, y[0].numel() // groups)
    for row, cell in enumerate(decodes.cells):
        inputs = opened(view.tail["input"], cell, cell.offset + 1).transpose(0, 1).float()
        torch.bmm(weights[row, ..., : cell.offset + 1], inputs, out=y[row])
        if cell.slot is not None:
            torch.bmm(C[row].unsqueeze(1), view.state["ssm"][cell.slot], out=earlier[row])
    return y.view_as(dtx).addcmul_(earlier.view_as(dtx), total.exp_().unsqueeze(-1))


def extend(
    dtx: Float[Tensor, "tokens heads head_dim"],
    steps: Float[Tensor, "tokens heads"],
    B: Float[Tensor, "tokens groups state"],
    C: Float[Tensor, "tokens groups state"],
    y: Float[Tensor, "tokens heads head_dim"],
    group: Group,
    view: RecurrentView,
) -> None:
    """Rows of several tokens, a cell at a time; their outputs go to `y`."""
    state = first_states(group, view.state["ssm"])
    kept = torch.empty_like(steps)
    for rank in group.ranks:
        total = totals(group, rank, steps, view.tail["decay"])
        inputs = with_tail(group, rank, gather(rank, dtx), view.tail["input"])
        keys = with_tail(group, rank, gather(rank, B), view.tail["B"])
        queries = outputs_only(rank, gather(rank, C))
        spread(rank, read(state, inputs, keys, queries, total, rank), y)
        if rank.stays:
            spread(rank, total[:, rank.first :], kept)
        if rank.continuing or rank.captures:
            state = advance(state, inputs, keys, total)
            hand_out(rank, state, view.state["ssm"])
            state = state[: rank.continuing]
    for name, values in (("input", dtx), ("B", B), ("decay", kept)):
        write_tail(group, values.to(view.tail[name].dtype), view.tail[name])


def read(
    state: Float[Tensor, "rows groups state width"] | None,
    inputs: Float[Tensor, "rows reach heads head_dim"],
    keys: Float[Tensor, "rows reach groups state"],
    queries: Float[Tensor, "rows outputs groups state"],
    total: Float[Tensor, "rows reach heads"],
    rank: Rank,
) -> Float[Tensor, "rows outputs heads head_dim"]:
    """Outputs of a rank: from the state before the cell and from the cell's own tokens up to each."""
    groups = keys.shape[2]
    columns = total.transpose(1, 2).contiguous()
    # Above the diagonal the exponential may overflow; tril_ overwrites, so no infinity is ever multiplied.
    weights = (columns[..., rank.first :, None] - columns[..., None, :]).exp_().tril_(rank.first)
    queries = queries.transpose(1, 2)
    scores = queries @ keys.permute(0, 2, 3, 1)
    weights.unflatten(1, (groups, -1)).mul_(scores.unsqueeze(2))
    y = (weights @ inputs.transpose(1, 2)).transpose(1, 2)
    if state is None:
        return y
    earlier = (queries @ state).transpose(1, 2).reshape(y.shape)
    return y.addcmul_(earlier, total[:, rank.first :].exp().unsqueeze(-1))


def advance(
    state: Float[Tensor, "rows groups state width"] | None,
    inputs: Float[Tensor, "rows reach heads head_dim"],
    keys: Float[Tensor, "rows reach groups state"],
    total: Float[Tensor, "rows reach heads"],
) -> Float[Tensor, "rows groups state width"]:
    """The states at the end of a cell: what was before it, decayed all through, and its tokens, each decayed since."""
    groups = keys.shape[2]
    since = torch.sub(total[:, -1:], total).exp_().unsqueeze(-1)
    decayed = (inputs * since).unflatten(2, (groups, -1)).flatten(3)
    added = keys.permute(0, 2, 3, 1) @ decayed.transpose(1, 2)
    if state is None:
        return added
    through = total[:, -1].exp().unflatten(1, (groups, -1)).repeat_interleave(inputs.shape[3], 2)
    return added.addcmul_(state, through.unsqueeze(2))
