"""The gated delta rule, in extend form on the grid.

For each value head, with keys and queries of unit length shared by the value heads of a key head:

    S = exp(g) S        u = beta (v - k S)        S = S + k^T u        y = q S

`u` is the *corrected value*. Once the u of a cell's tokens are known, the state is a plain decayed sum of k^T u. A
tail stores them, so that a decode reads its checkpoint once, with k and q together. In a longer row they solve a
unit triangular system. Here everything is computed and stored in float32, in models of any dtype; GPU kernels
multiply in the model's dtype, and store a tail's k and u in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cpu.cells import (
    append,
    append_all,
    gather,
    open_cells,
    opened,
    outputs_only,
    tail_columns,
    total_of_one,
    totals_of_all,
    with_tail,
)
from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.cpu.recurrence import Columns, scan
from weft.kernels.interface import Batch
from weft.kernels.recurrent import DeltaInputs, DeltaShape, conv_parts, delta_state
from weft.kernels.states import states_of
from weft.memory.spec import Part, RecurrentMemory

NORM_EPSILON = 1e-6


def gated_delta_memory(shape: DeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k, u and the log decay since its cell's start, all in float32.

    A tail is laid out by head and cell, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.key_heads, shape.key_dim), "float32", apart=1, whole_cells=True),
        Part("u", (shape.value_heads, shape.value_dim), "float32", apart=1, whole_cells=True),
        Part("decay", (shape.value_heads,), "float32", apart=1, whole_cells=True),
    )
    return RecurrentMemory((window, *delta_state(shape)), tail, shape.conv_width)


def gated_delta(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens value_heads value_dim"]:
    g, beta = inputs.step, inputs.strength.float()
    if inputs.rates is not None:
        assert inputs.bias is not None
        g = F.softplus(g.float() + inputs.bias) * inputs.rates
        beta = beta.sigmoid().mul_(inputs.most)
    both, values = unit_keys_and_queries(inputs.k, inputs.q), inputs.v.float()
    return scan(GatedDelta(both, values, g, beta.unsqueeze(-1)), batch, view).to(inputs.v.dtype)


def unit_keys_and_queries(
    k: Float[Tensor, "tokens key_heads key_dim"], q: Float[Tensor, "tokens key_heads key_dim"]
) -> Float[Tensor, "tokens key_heads 2 key_dim"]:
    """Return keys of length 1 and queries of length 1 / sqrt(key_dim) in one tensor: they are always used together."""
    both = torch.stack((k, q), 2).float()
    epsilon, lengths = _constants(both.shape[-1], both.device)
    length = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
    return both.mul_(torch.addcmul(epsilon, length, length).rsqrt_().mul_(lengths))


@lru_cache
def _constants(key_dim: int, device: torch.device) -> tuple[Tensor, Float[Tensor, "2 1"]]:
    """Return the epsilon under the root, and the lengths of keys and queries."""
    return torch.tensor(NORM_EPSILON, device=device), torch.tensor([[1.0], [key_dim**-0.5]], device=device)


@dataclass(slots=True)
class GatedDelta:
    """The rule on cells. `both` holds keys and queries, `beta` the rates of correction."""

    both: Float[Tensor, "tokens key_heads 2 key_dim"]
    values: Float[Tensor, "tokens value_heads value_dim"]
    steps: Float[Tensor, "tokens value_heads"]
    beta: Float[Tensor, "tokens value_heads 1"]
    name: str = "delta"

    def first(self, count: int) -> GatedDelta:
        return GatedDelta(self.both[:count], self.values[:count], self.steps[:count], self.beta[:count])

    def empty_outputs(self) -> Tensor:
        return torch.empty_like(self.values)

    def given(self) -> dict[str, Tensor]:
        return {"k": self.both[:, :, 0]}

    def decode_one(self, cell: OpenCell, view: RecurrentView) -> Float[Tensor, "value_heads value_dim"]:
        """Decode a single row, which needs no index: everything is a view."""
        both, values = self.both[0], self.values[0]
        heads, length = len(values), cell.offset + 1
        total = total_of_one(view.tail["decay"], cell, self.steps[0])
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
            found.baddbmm_(decayed, states_of(view, "delta").read(cell.slot))
        corrected = torch.sub(values, found[:, 0]).mul_(self.beta[0])
        view.tail["u"][cell.tail, (cell.low + cell.offset) % view.tail["u"].shape[1]] = corrected
        return torch.addcmul(found[:, 1], weights[:, 1, -1:], corrected)

    def decode_all(self, decodes: Decodes, view: RecurrentView) -> Float[Tensor, "rows value_heads value_dim"]:
        """Compute small values for all rows at once, and go row by row where a gather would cost more than the read."""
        both, values = self.both, self.values
        rows, heads = self.steps.shape
        keys = both[:, :, 0]
        total = totals_of_all(view.tail["decay"], decodes, self.steps)
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
                found[row].baddbmm_(decayed[row], states_of(view, "delta").read(cell.slot))
        corrected = torch.sub(values, found[:, :, 0]).mul_(self.beta)
        append_all(view.tail["u"], decodes, corrected)
        own = per_value_head((keys * both[:, :, 1]).sum(-1, keepdim=True), heads)
        return torch.addcmul(found[:, :, 1], own, corrected)

    def pass_cell(
        self,
        group: Group,
        rank: Rank,
        state: Float[Tensor, "rows value_heads key_dim value_dim"] | None,
        total: Float[Tensor, "rows reach value_heads"],
        view: RecurrentView,
    ) -> tuple[Float[Tensor, "rows outputs value_heads value_dim"], Columns]:
        """Compute a rank. Intermediate tensors have heads before columns."""
        new = gather(rank, self.both)
        keys = with_tail(group, rank, new[:, :, :, 0], view.tail["k"])
        heads_total = total.transpose(1, 2).contiguous()
        lookups = outputs_only(rank, new).transpose(1, 2)
        found, weights = look_up(state, lookups, keys.transpose(1, 2), heads_total, rank.first)
        errors, rate = (outputs_only(rank, gather(rank, packed)).transpose(1, 2) for packed in (self.values, self.beta))
        if found is not None:
            errors = errors - found[:, :, 0]
        u = correct(group, rank, errors, rate, weights[:, :, 0], view)
        outputs = weights[:, :, 1] @ u
        if found is not None:
            outputs.add_(found[:, :, 1])
        return outputs.transpose(1, 2), {"k": keys, "u": u.transpose(1, 2), "decay": total}

    def advance(
        self, state: Float[Tensor, "rows value_heads key_dim value_dim"] | None, columns: Columns
    ) -> Float[Tensor, "rows value_heads key_dim value_dim"]:
        """Return the decayed earlier state plus the cell's tokens, each decayed since."""
        keys, corrected, total = columns["k"].transpose(1, 2), columns["u"].transpose(1, 2), columns["decay"]
        since = torch.sub(total[:, -1:], total).exp_().transpose(1, 2).unsqueeze(-1)
        added: Tensor = keys.transpose(2, 3).unsqueeze(2) @ (corrected * since).unflatten(1, (keys.shape[1], -1))
        added = added.flatten(1, 2)
        return added if state is None else added.addcmul_(state, total[:, -1].exp()[..., None, None])


def per_value_head(x: Float[Tensor, "rows key_heads ..."], value_heads: int) -> Float[Tensor, "rows value_heads ..."]:
    """Return each key head's values for all the value heads that share it."""
    return x if x.shape[1] == value_heads else x.repeat_interleave(value_heads // x.shape[1], 1)


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
        assert group.is_tail is not None
        is_tail = group.is_tail[:, None, rank.first :, None]
        right = torch.where(is_tail, within.transpose(1, 2), right)
        rate = rate.masked_fill(is_tail, 0.0)
    matrix = weights.mul_(rate)
    if before is None:
        solved: Tensor = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
        return solved
    before = before.transpose(1, 2)
    right -= matrix[..., : rank.first] @ before
    u = torch.linalg.solve_triangular(matrix[..., rank.first :], right, upper=False, unitriangular=True)
    return torch.cat((before, u), 2)
