"""The state space recurrence of Mamba2 (scalar decay per head), in extend form on the grid.

For each head, with B and C shared by the heads of a group:

    S = exp(dt A) S + dt B x^T        y = C S + D x

and then y may be gated. The recurrence is computed and stored in float32, in models of any dtype. A state lies as
[groups, state, heads of a group * head_dim], so that reading it is one matmul of C with contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cpu.activation import gated_product
from weft.kernels.cpu.cells import (
    append,
    append_all,
    gather,
    open_cells,
    opened,
    outputs_only,
    total_of_one,
    totals_of_all,
    with_tail,
)
from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.cpu.recurrence import Columns, scan
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.kernels.recurrent import UNLIMITED, SsdInputs, SsdShape, conv_parts, ssd_state
from weft.kernels.states import states_of
from weft.memory.spec import Part, RecurrentMemory


def ssd_memory(shape: SsdShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves its input dt x, B and the log decay since its cell's start.

    A tail is laid out by head, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("input", (shape.heads, shape.head_dim), "float32", apart=1),
        Part("B", (shape.groups, shape.state), "float32", apart=1),
        Part("decay", (shape.heads,), "float32", apart=1),
    )
    return RecurrentMemory((window, *ssd_state(shape)), tail, shape.conv_width)


def ssd(
    inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Float[Tensor, "tokens heads head_dim"] | None = None
) -> Float[Tensor, "tokens heads head_dim"]:
    return gated(ungated(inputs, batch, view), inputs.gate, out)


def gated(
    y: Float[Tensor, "tokens heads head_dim"], gate: Float[Tensor, "tokens inner"] | None, out: Tensor | None
) -> Float[Tensor, "tokens heads head_dim"]:
    """Return silu(gate) * y, or y if there is no gate."""
    if gate is None:
        return placed(y, out)
    return gated_product(gate, y.flatten(-2), F.silu, None if out is None else out.flatten(-2)).view_as(y)


def ungated(inputs: SsdInputs, batch: Batch, view: RecurrentView) -> Float[Tensor, "tokens heads head_dim"]:
    x, dt = inputs.x, inputs.dt
    if inputs.dt_bias is not None:
        dt = time_step(dt, inputs.dt_bias, inputs.limit)
    dtx = x * dt.unsqueeze(-1)
    y = scan(Ssd(dtx, dt * inputs.A, inputs.B.float(), inputs.C.float()), batch, view)
    if inputs.D is not None:
        y.addcmul_(x, inputs.D.unsqueeze(-1))
    return y.to(x.dtype)


def time_step(
    raw: Float[Tensor, "tokens heads"], bias: Float[Tensor, " heads"], limit: tuple[float, float]
) -> Float[Tensor, "tokens heads"]:
    step = F.softplus(raw.float() + bias)
    return step if limit == UNLIMITED else step.clamp(*limit)


@dataclass(slots=True)
class Ssd:
    """The recurrence on cells: y = exp(total) C S + sum over the cell of exp(total - total_j) (C B_j) dt_j x_j."""

    dtx: Float[Tensor, "tokens heads head_dim"]
    steps: Float[Tensor, "tokens heads"]
    B: Float[Tensor, "tokens groups state"]
    C: Float[Tensor, "tokens groups state"]
    name: str = "ssm"

    def first(self, count: int) -> Ssd:
        return Ssd(self.dtx[:count], self.steps[:count], self.B[:count], self.C[:count])

    def empty_outputs(self) -> Tensor:
        return torch.empty_like(self.dtx)

    def given(self) -> dict[str, Tensor]:
        return {"input": self.dtx, "B": self.B}

    def decode_one(self, cell: OpenCell, view: RecurrentView) -> Float[Tensor, "heads head_dim"]:
        """Decode a single row, which needs no index: everything is a view."""
        dtx, C = self.dtx[0], self.C[0]
        total = total_of_one(view.tail["decay"], cell, self.steps[0])
        since = torch.sub(total, append(view.tail["decay"], cell, total)).exp_()
        keys, inputs = append(view.tail["B"], cell, self.B[0]), append(view.tail["input"], cell, dtx)
        query = C.unsqueeze(1)
        scores = torch.bmm(query, keys.permute(1, 2, 0))
        weights = since.t().view(len(C), -1, len(since)) * scores
        y = torch.bmm(weights.contiguous().view(len(dtx), 1, -1), inputs.transpose(0, 1)).view(dtx.shape)
        if cell.slot is None:
            return y
        found = torch.bmm(query, states_of(view, "ssm").read(cell.slot))
        return y.addcmul_(found.view(dtx.shape), total.exp().unsqueeze(-1))

    def decode_all(self, decodes: Decodes, view: RecurrentView) -> Float[Tensor, "rows heads head_dim"]:
        """Compute small values for all rows at once, and go row by row where a gather would cost more than the read."""
        dtx, B, C = self.dtx, self.B, self.C
        total = totals_of_all(view.tail["decay"], decodes, self.steps)
        for name, values in (("input", dtx), ("B", B), ("decay", total)):
            append_all(view.tail[name], decodes, values)
        since = torch.sub(total.unsqueeze(1), open_cells(view.tail["decay"], decodes)).exp_()
        scores = open_cells(view.tail["B"], decodes).transpose(1, 2) @ C.unsqueeze(-1)
        rows, heads, groups = *self.steps.shape, B.shape[1]
        weights = since.view(rows, -1, groups, heads // groups).permute(0, 2, 3, 1) * scores.transpose(2, 3)
        weights = weights.contiguous().view(rows, heads, 1, -1)
        y = torch.empty_like(dtx).unsqueeze(2)
        earlier = y.new_zeros(rows, groups, 1, y[0].numel() // groups)
        for row, cell in enumerate(decodes.cells):
            inputs = opened(view.tail["input"], cell, cell.offset + 1).transpose(0, 1)
            torch.bmm(weights[row, ..., : cell.offset + 1], inputs, out=y[row])
            if cell.slot is not None:
                torch.bmm(C[row].unsqueeze(1), states_of(view, "ssm").read(cell.slot), out=earlier[row])
        return y.view_as(dtx).addcmul_(earlier.view_as(dtx), total.exp_().unsqueeze(-1))

    def pass_cell(
        self,
        group: Group,
        rank: Rank,
        state: Float[Tensor, "rows groups state width"] | None,
        total: Float[Tensor, "rows reach heads"],
        view: RecurrentView,
    ) -> tuple[Float[Tensor, "rows outputs heads head_dim"], Columns]:
        inputs = with_tail(group, rank, gather(rank, self.dtx), view.tail["input"])
        keys = with_tail(group, rank, gather(rank, self.B), view.tail["B"])
        queries = outputs_only(rank, gather(rank, self.C))
        return read(state, inputs, keys, queries, total, rank), {"input": inputs, "B": keys, "decay": total}

    def advance(
        self, state: Float[Tensor, "rows groups state width"] | None, columns: Columns
    ) -> Float[Tensor, "rows groups state width"]:
        """Return the decayed earlier state plus the cell's tokens, each decayed since."""
        inputs, keys, total = columns["input"], columns["B"], columns["decay"]
        groups = keys.shape[2]
        since = torch.sub(total[:, -1:], total).exp_().unsqueeze(-1)
        decayed = (inputs * since).unflatten(2, (groups, -1)).flatten(3)
        added: Tensor = keys.permute(0, 2, 3, 1) @ decayed.transpose(1, 2)
        if state is None:
            return added
        through = total[:, -1].exp().unflatten(1, (groups, -1)).repeat_interleave(inputs.shape[3], 2)
        return added.addcmul_(state, through.unsqueeze(2))


def read(
    state: Float[Tensor, "rows groups state width"] | None,
    inputs: Float[Tensor, "rows reach heads head_dim"],
    keys: Float[Tensor, "rows reach groups state"],
    queries: Float[Tensor, "rows outputs groups state"],
    total: Float[Tensor, "rows reach heads"],
    rank: Rank,
) -> Float[Tensor, "rows outputs heads head_dim"]:
    """Return the outputs of a rank: from the state before the cell and from the cell's own tokens up to each."""
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
