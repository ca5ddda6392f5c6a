"""The gated delta rule, in extend form on the grid.

For each value head, with keys and queries of unit length shared by the value heads of a key head:

    S = exp(g) S        u = beta (v - k S)        S = S + k^T u        y = q S

`u` is the *corrected value*. Once the u of a cell's tokens are known, the state is a plain decayed sum of k^T u. A
tail stores them, so that a decode reads its checkpoint once, with k and q together. In a longer row they solve a
unit triangular system. Here everything is computed and stored in float32, in models of any dtype; GPU kernels
multiply in the model's dtype, and store a tail's k and u in it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.kernels.cpu.cells import (
    append,
    append_all,
    first_states,
    gather,
    hand_out,
    open_cells,
    opened,
    outputs_only,
    spread,
    tail_columns,
    total_of_one,
    totals,
    totals_of_all,
    with_tail,
    write_tail,
)
from weft.kernels.cpu.index_building import indices
from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.interface import Batch
from weft.kernels.recurrent import DeltaInputs, DeltaShape, conv_parts, delta_state
from weft.memory.device.store import RecurrentView
from weft.memory.spec import Part, RecurrentMemory

NORM_EPSILON = 1e-6


def gated_delta_memory(shape: DeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k, u and the log decay since its cell's start, all in float32.

    A tail is laid out by head, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.key_heads, shape.key_dim), "float32", apart=1),
        Part("u", (shape.value_heads, shape.value_dim), "float32", apart=1),
        Part("decay", (shape.value_heads,), "float32", apart=1),
    )
    return RecurrentMemory((window, delta_state(shape)), tail, shape.conv_width)


def gated_delta(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens value_heads value_dim"]:
    chosen = indices(batch)
    g, beta = inputs.step, inputs.strength.float()
    if inputs.rates is not None:
        assert inputs.bias is not None
        g = F.softplus(g.float() + inputs.bias) * inputs.rates
        beta = beta.sigmoid().mul_(inputs.most)
    both, values, beta = unit_keys_and_queries(inputs.k, inputs.q), inputs.v.float(), beta.unsqueeze(-1)
    count = batch.decodes
    if not chosen.groups:
        return decode(both, values, g, beta, chosen.decodes, view).to(inputs.v.dtype)
    y = torch.empty_like(values)
    if chosen.decodes is not None:
        y[:count] = decode(both[:count], values[:count], g[:count], beta[:count], chosen.decodes, view)
    for group in chosen.groups:
        extend(both, values, g, beta, y, group, view)
    return y.to(inputs.v.dtype)


def unit_keys_and_queries(
    k: Float[Tensor, "tokens key_heads key_dim"], q: Float[Tensor, "tokens key_heads key_dim"]
) -> Float[Tensor, "tokens key_heads 2 key_dim"]:
    """Return keys of length 1 beside queries of length 1 / sqrt(key_dim): they are always used together."""
    both = torch.stack((k, q), 2).float()
    epsilon, lengths = _constants(both.shape[-1], both.device)
    length = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
    return both.mul_(torch.addcmul(epsilon, length, length).rsqrt_().mul_(lengths))


@lru_cache
def _constants(key_dim: int, device: torch.device) -> tuple[Tensor, Float[Tensor, "2 1"]]:
    """Return the epsilon under the root, and the lengths of keys and queries."""
    return torch.tensor(NORM_EPSILON, device=device), torch.tensor([[1.0], [key_dim**-0.5]], device=device)


def decode(
    both: Float[Tensor, "rows key_heads 2 key_dim"],
    values: Float[Tensor, "rows value_heads value_dim"],
    steps: Float[Tensor, "rows value_heads"],
    beta: Float[Tensor, "rows value_heads 1"],
    decodes: Decodes,
    view: RecurrentView,
) -> Float[Tensor, "rows value_heads value_dim"]:
    """Decode one token per row: read the decayed state for k and for q, then apply the token's correction."""
    if decodes.rows == 1:
        y = decode_one(both[0], values[0], steps[0], beta[0], decodes.cells[0], view).unsqueeze(0)
    else:
        y = decode_all(both, values, steps, beta, decodes, view)
    for row, slot in decodes.captures:
        cell = decodes.cells[row]
        keys, u, total = (opened(view.tail[name], cell, cell.offset + 1)[None] for name in ("k", "u", "decay"))
        before = None if cell.slot is None else view.state["delta"][cell.slot].unsqueeze(0)
        view.state["delta"][slot] = advance(before, keys.transpose(1, 2), u.transpose(1, 2), total)[0]
    return y


def decode_one(
    both: Float[Tensor, "key_heads 2 key_dim"],
    values: Float[Tensor, "value_heads value_dim"],
    step: Float[Tensor, " value_heads"],
    beta: Float[Tensor, "value_heads 1"],
    cell: OpenCell,
    view: RecurrentView,
) -> Float[Tensor, "value_heads value_dim"]:
    """Decode a single row, which needs no index: everything is a view."""
    heads, length = len(values), cell.offset + 1
    total = total_of_one(view.tail["decay"], cell, step)
    since = torch.sub(total, append(view.tail["decay"], cell, total)).exp_()
    scores = torch.bmm(both, append(view.tail["k"], cell, both[:, 0]).permute(1, 2, 0))
    weights = scores.unsqueeze(1) * since.t().view(len(both), -1, 1, length)
    weights = weights.reshape(heads, 2, length)
    if cell.offset:
        earlier = opened(view.tail["u"], cell, cell.offset).transpose(0, 1)
        found = torch.bmm(weights[..., : cell.offset], earlier)
    else:
        found = values.new_zeros(heads, 2, values.shape[1])
    if cell.slot is not None:
        decayed = per_value_head(both[None], heads)[0] * total.exp().view(heads, 1, 1)
        found.baddbmm_(decayed, view.state["delta"][cell.slot])
    corrected = torch.sub(values, found[:, 0]).mul_(beta)
    view.tail["u"][cell.tail, (cell.low + cell.offset) % view.tail["u"].shape[1]] = corrected
    return torch.addcmul(found[:, 1], weights[:, 1, -1:], corrected)


def decode_all(
    both: Float[Tensor, "rows key_heads 2 key_dim"],
    values: Float[Tensor, "rows value_heads value_dim"],
    steps: Float[Tensor, "rows value_heads"],
    beta: Float[Tensor, "rows value_heads 1"],
    decodes: Decodes,
    view: RecurrentView,
) -> Float[Tensor, "rows value_heads value_dim"]:
    """Compute small values for all rows at once, then go row by row where a gather would cost more than the read."""
    rows, heads = steps.shape
    keys = both[:, :, 0]
    total = totals_of_all(view.tail["decay"], decodes, steps)
    append_all(view.tail["k"], decodes, keys)
    append_all(view.tail["decay"], decodes, total)
    since = torch.sub(total.unsqueeze(1), open_cells(view.tail["decay"], decodes)).exp_()
    scores = both.new_empty(*both.shape[:3], decodes.reach)
    for row, cell in enumerate(decodes.cells):
        torch.bmm(both[row], opened(view.tail["k"], cell, decodes.reach).permute(1, 2, 0), out=scores[row])
    weights = per_value_head(scores, heads) * since.transpose(1, 2).contiguous().unsqueeze(2)
    decayed = per_value_head(both, heads) * total.exp_().view(rows, heads, 1, 1)
    found = values.new_zeros(rows, heads, 2, values.shape[2])
    for row, cell in enumerate(decodes.cells):
        if cell.offset:
            earlier = opened(view.tail["u"], cell, cell.offset).transpose(0, 1)
            torch.bmm(weights[row, ..., : cell.offset], earlier, out=found[row])
        if cell.slot is not None:
            found[row].baddbmm_(decayed[row], view.state["delta"][cell.slot])
    corrected = torch.sub(values, found[:, :, 0]).mul_(beta)
    append_all(view.tail["u"], decodes, corrected)
    own = per_value_head((keys * both[:, :, 1]).sum(-1, keepdim=True), heads)
    return torch.addcmul(found[:, :, 1], own, corrected)


def per_value_head(x: Float[Tensor, "rows key_heads ..."], value_heads: int) -> Float[Tensor, "rows value_heads ..."]:
    """Return each key head's values for all the value heads that share it."""
    return x if x.shape[1] == value_heads else x.repeat_interleave(value_heads // x.shape[1], 1)


def extend(
    both: Float[Tensor, "tokens key_heads 2 key_dim"],
    values: Float[Tensor, "tokens value_heads value_dim"],
    steps: Float[Tensor, "tokens value_heads"],
    beta: Float[Tensor, "tokens value_heads 1"],
    y: Float[Tensor, "tokens value_heads value_dim"],
    group: Group,
    view: RecurrentView,
) -> None:
    """Compute rows of several tokens, a cell at a time; write outputs to `y`. Inside, heads come before columns."""
    state = first_states(group, view.state["delta"])
    kept, corrected = torch.empty_like(steps), torch.empty_like(values)
    for rank in group.ranks:
        total = totals(group, rank, steps, view.tail["decay"])
        new = gather(rank, both)
        keys = with_tail(group, rank, new[:, :, :, 0], view.tail["k"]).transpose(1, 2)
        heads_total = total.transpose(1, 2).contiguous()
        found, weights = look_up(state, outputs_only(rank, new).transpose(1, 2), keys, heads_total, rank.first)
        errors, rate = (outputs_only(rank, gather(rank, packed)).transpose(1, 2) for packed in (values, beta))
        if found is not None:
            errors = errors - found[:, :, 0]
        u = correct(group, rank, errors, rate, weights[:, :, 0], view)
        read = weights[:, :, 1] @ u
        spread(rank, (read if found is None else read.add_(found[:, :, 1])).transpose(1, 2), y)
        if rank.stays:
            spread(rank, u[:, :, rank.first :].transpose(1, 2), corrected)
            spread(rank, total[:, rank.first :], kept)
        if rank.continuing or rank.captures:
            state = advance(state, keys, u, total)
            hand_out(rank, state, view.state["delta"])
            state = state[: rank.continuing]
    write_tail(group, both[:, :, 0], view.tail["k"])
    write_tail(group, corrected, view.tail["u"])
    write_tail(group, kept, view.tail["decay"])


def look_up(
    state: Float[Tensor, "rows value_heads key_dim value_dim"] | None,
    both: Float[Tensor, "rows key_heads outputs 2 key_dim"],
    keys: Float[Tensor, "rows key_heads reach key_dim"],
    total: Float[Tensor, "rows value_heads reach"],
    first: int,
) -> tuple[
    Float[Tensor, "rows value_heads 2 outputs value_dim"] | None, Float[Tensor, "rows value_heads 2 outputs reach"]
]:
    """Return, for each output's key and query, the read of the state before the cell and the cell tokens' weights."""
    rows, key_heads, outputs = both.shape[:3]
    shared = total.shape[1] // key_heads
    lookups = both.transpose(2, 3).flatten(2, 3)
    # Above the diagonal the exponential may overflow; tril_ overwrites, so no infinity is ever multiplied.
    decay = (total[..., first:, None] - total[..., None, :]).exp_().tril_(first)
    scores = (lookups @ keys.transpose(2, 3)).view(rows, key_heads, 1, 2, outputs, -1)
    weights = (decay.view(rows, key_heads, shared, 1, outputs, -1) * scores).flatten(1, 2)
    if state is None:
        return None, weights
    found = lookups.unsqueeze(2) @ state.unflatten(1, (key_heads, shared))
    found = found.view(rows, total.shape[1], 2, outputs, -1)
    return found.mul_(total[..., first:].exp().view(rows, -1, 1, outputs, 1)), weights


def correct(
    group: Group,
    rank: Rank,
    errors: Float[Tensor, "rows value_heads outputs value_dim"],
    rate: Float[Tensor, "rows value_heads outputs 1"],
    weights: Float[Tensor, "rows value_heads outputs reach"],
    view: RecurrentView,
) -> Float[Tensor, "rows value_heads reach value_dim"]:
    """Return the corrected values of a rank's columns: u + rate (weights below the diagonal) u = rate * errors."""
    before, within = tail_columns(group, rank, view.tail["u"])
    right = errors * rate
    if within is not None:
        # On a tail's column u is known, so its equation is u = u.
        is_tail = group.is_tail[:, None, rank.first :, None]
        right = torch.where(is_tail, within.transpose(1, 2), right)
        rate = rate.masked_fill(is_tail, 0.0)
    matrix = weights.mul_(rate)
    if before is None:
        return torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    before = before.transpose(1, 2)
    right -= matrix[..., : rank.first] @ before
    u = torch.linalg.solve_triangular(matrix[..., rank.first :], right, upper=False, unitriangular=True)
    return torch.cat((before, u), 2)


def advance(
    state: Float[Tensor, "rows value_heads key_dim value_dim"] | None,
    keys: Float[Tensor, "rows key_heads reach key_dim"],
    corrected: Float[Tensor, "rows value_heads reach value_dim"],
    total: Float[Tensor, "rows reach value_heads"],
) -> Float[Tensor, "rows value_heads key_dim value_dim"]:
    """Return the states at the end of a cell: the decayed earlier state plus the cell's tokens, each decayed since."""
    since = torch.sub(total[:, -1:], total).exp_().transpose(1, 2).unsqueeze(-1)
    added = keys.transpose(2, 3).unsqueeze(2) @ (corrected * since).unflatten(1, (keys.shape[1], -1))
    added = added.flatten(1, 2)
    return added if state is None else added.addcmul_(state, total[:, -1].exp()[..., None, None])
