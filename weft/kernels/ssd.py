"""The state space recurrence of Mamba2 (scalar decay per head), in extend form on the grid.

For each head, with B and C shared by the heads of a group:

    S = exp(dt A) S + dt B x^T        y = C S + D x

Whatever the model's dtype, all of it is computed and remembered in float32. A state lies as [groups, state, heads of a
group * head_dim], so that reading it is one product of C with contiguous memory.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.batch import Batch, Decodes, Group, Rank
from weft.kernels.causal_conv import conv_parts
from weft.kernels.cells import (
    decode_keys,
    decode_total,
    first_states,
    gather,
    hand_out,
    opened,
    outputs_only,
    put,
    spread,
    totals,
    with_tail,
    write_tail,
)
from weft.memory.device.store import RecurrentView
from weft.memory.spec import Part, RecurrentMemory


def ssd_memory(
    heads: int, head_dim: int, state: int, groups: int, conv_channels: int, conv_width: int, conv_dtype: str
) -> RecurrentMemory:
    """What a Mamba2 layer remembers. A token leaves dt x, B and the log decay since its cell's start."""
    window, conv_input = conv_parts(conv_channels, conv_width, conv_dtype)
    matrix = Part("ssm", (groups, state, heads // groups * head_dim), "float32")
    tail = (
        conv_input,
        Part("dtx", (heads, head_dim), "float32"),
        Part("B", (groups, state), "float32"),
        Part("decay", (heads,), "float32"),
    )
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
) -> Float[Tensor, "tokens heads head_dim"]:
    """`dt` is positive (softplus and limits applied), `A` negative, both float32."""
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


def decode(
    dtx: Float[Tensor, "rows heads head_dim"],
    steps: Float[Tensor, "rows heads"],
    B: Float[Tensor, "rows groups state"],
    C: Float[Tensor, "rows groups state"],
    decodes: Decodes,
    view: RecurrentView,
) -> Float[Tensor, "rows heads head_dim"]:
    """One token a row: y = exp(total) C S + sum over the cell of exp(total - total_j) (C B_j) dt_j x_j."""
    total = decode_total(view.tail["decay"], decodes, steps)
    put(view.tail["dtx"], decodes, dtx)
    put(view.tail["B"], decodes, B)
    put(view.tail["decay"], decodes, total)
    since = torch.sub(total.unsqueeze(1), decode_keys(view.tail["decay"], decodes)).exp_()
    scores = decode_keys(view.tail["B"], decodes).transpose(1, 2) @ C.unsqueeze(-1)
    rows, heads, groups = len(dtx), dtx.shape[1], B.shape[1]
    weights = since.view(rows, -1, groups, heads // groups).permute(0, 2, 3, 1) * scores.transpose(2, 3)
    weights = weights.contiguous().view(rows, heads, 1, -1)
    y = torch.empty_like(dtx).unsqueeze(2)
    states = y.new_zeros(rows, groups, 1, y[0].numel() // groups)
    for row, cell in enumerate(decodes.cells):
        length = cell.offset + 1
        inputs = opened(view.tail["dtx"], cell, length).transpose(0, 1)
        torch.bmm(weights[row, :, :, :length], inputs, out=y[row])
        if cell.slot is not None:
            torch.bmm(C[row].unsqueeze(1), view.state["ssm"][cell.slot], out=states[row])
    y = y.view_as(dtx).addcmul_(states.view_as(dtx), total.exp().unsqueeze(-1))
    capture_decodes(since, total, decodes, view)
    return y


def capture_decodes(
    since: Float[Tensor, "rows reach heads"], total: Float[Tensor, "rows heads"], decodes: Decodes, view: RecurrentView
) -> None:
    """Hand out the states of rows whose new token ends a cell."""
    for row, slot in decodes.captures:
        cell, one = decodes.cells[row], slice(row, row + 1)
        inputs, keys = (opened(view.tail[name], cell, cell.offset + 1).unsqueeze(0) for name in ("dtx", "B"))
        before = None if cell.slot is None else view.state["ssm"][cell.slot].unsqueeze(0)
        view.state["ssm"][slot] = advance(before, inputs, keys, since[one], total[one].exp())[0]


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
        inputs = with_tail(group, rank, gather(rank, dtx), view.tail["dtx"])
        keys = with_tail(group, rank, gather(rank, B), view.tail["B"])
        queries = outputs_only(rank, gather(rank, C))
        spread(rank, read(state, inputs, keys, queries, total, rank), y)
        if rank.stays:
            spread(rank, total[:, rank.first :], kept)
        if rank.continuing or rank.captures:
            last = total[:, -1:]
            state = advance(state, inputs, keys, torch.exp(last - total), last[:, 0].exp())
            hand_out(rank, state, view.state["ssm"])
            state = state[: rank.continuing]
    write_tail(group, dtx, view.tail["dtx"])
    write_tail(group, B, view.tail["B"])
    write_tail(group, kept, view.tail["decay"])


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
    since: Float[Tensor, "rows reach heads"],
    through: Float[Tensor, "rows heads"],
) -> Float[Tensor, "rows groups state width"]:
    """The states at the end of a cell: what was before it, decayed `through` it, and its tokens, decayed `since`."""
    groups = keys.shape[2]
    decayed = (inputs * since.unsqueeze(-1)).unflatten(2, (groups, -1)).flatten(3)
    added = keys.permute(0, 2, 3, 1) @ decayed.transpose(1, 2)
    if state is None:
        return added
    through = through.unflatten(1, (groups, -1)).repeat_interleave(inputs.shape[3], 2)
    return added.addcmul_(state, through.unsqueeze(2))
