"""The delta rule with a decay for each channel of a key, in extend form on the grid.

As in `gated_delta.py`, a tail stores corrected values, and those of a longer row solve a unit triangular system. But
the decay between two tokens no longer factors out of the product of their keys: each channel has its own. It is the
exponential of a difference, and neither factor of it alone need be finite, so decays are always taken between a token
and a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cpu.cells import append, gather, opened, outputs_only, total_of_one, with_tail
from weft.kernels.cpu.gated_delta import correct, unit_keys_and_queries
from weft.kernels.cpu.indices import Decodes, Group, OpenCell, Rank
from weft.kernels.cpu.recurrence import Columns, scan
from weft.kernels.interface import Batch
from weft.kernels.plain.channel_delta import decays_and_rates
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape, channel_delta_state, conv_parts
from weft.kernels.states import states_of
from weft.memory.spec import Part, RecurrentMemory

# Tokens whose pairs are weighed channel by channel; those further apart are weighed by matmuls.
NEAR = 16


def channel_delta_memory(shape: ChannelDeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k, u and the log decays since its cell's start, all in float32.

    A tail is laid out by head and cell, as it is read.
    """
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.heads, shape.key_dim), "float32", apart=1, whole_cells=True),
        Part("u", (shape.heads, shape.value_dim), "float32", apart=1, whole_cells=True),
        Part("decay", (shape.heads, shape.key_dim), "float32", apart=1, whole_cells=True),
    )
    return RecurrentMemory((window, *channel_delta_state(shape)), tail, shape.conv_width)


def channel_delta(
    inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens heads value_dim"]:
    g, beta = decays_and_rates(inputs)
    mixer = ChannelDelta(unit_keys_and_queries(inputs.k, inputs.q), inputs.v.float(), g, beta.unsqueeze(-1))
    return scan(mixer, batch, view).to(inputs.v.dtype)


@dataclass(slots=True)
class ChannelDelta:
    """The rule on cells. `both` holds keys and queries, `beta` the rates of correction."""

    both: Float[Tensor, "tokens heads 2 key_dim"]
    values: Float[Tensor, "tokens heads value_dim"]
    steps: Float[Tensor, "tokens heads key_dim"]
    beta: Float[Tensor, "tokens heads 1"]
    name: str = "channel_delta"

    def first(self, count: int) -> ChannelDelta:
        return self.some(0, count)

    def some(self, low: int, high: int) -> ChannelDelta:
        parts = {name: getattr(self, name)[low:high] for name in ("both", "values", "steps", "beta")}
        return replace(self, **parts)

    def empty_outputs(self) -> Tensor:
        return torch.empty_like(self.values)

    def given(self) -> dict[str, Tensor]:
        return {"k": self.both[:, :, 0]}

    def decode_one(self, cell: OpenCell, view: RecurrentView) -> Float[Tensor, "heads value_dim"]:
        both, values = self.both[0], self.values[0]
        total = total_of_one(view.tail["decay"], cell, self.steps[0])
        since = torch.sub(total, append(view.tail["decay"], cell, total)).exp_()
        keys = append(view.tail["k"], cell, both[:, 0]) * since
        weights = torch.bmm(both, keys.permute(1, 2, 0))
        found = torch.bmm(weights[..., :-1], opened(view.tail["u"], cell, cell.offset).transpose(0, 1))
        if cell.slot is not None:
            found.baddbmm_(both * total.exp().unsqueeze(1), states_of(view, self.name).read(cell.slot))
        corrected = torch.sub(values, found[:, 0]).mul_(self.beta[0])
        append(view.tail["u"], cell, corrected)
        return torch.addcmul(found[:, 1], weights[:, 1, -1:], corrected)

    def decode_all(self, decodes: Decodes, view: RecurrentView) -> Float[Tensor, "rows heads value_dim"]:
        """Decode row by row: with decays by channel, a row has no small values that others could share."""
        rows = [self.some(row, row + 1).decode_one(cell, view) for row, cell in enumerate(decodes.cells)]
        return torch.stack(rows)

    def pass_cell(
        self,
        group: Group,
        rank: Rank,
        state: Float[Tensor, "rows heads key_dim value_dim"] | None,
        total: Float[Tensor, "rows reach heads key_dim"],
        view: RecurrentView,
    ) -> tuple[Float[Tensor, "rows outputs heads value_dim"], Columns]:
        """Compute a rank. Intermediate tensors have heads before columns."""
        new = gather(rank, self.both)
        keys = with_tail(group, rank, new[:, :, :, 0], view.tail["k"])
        lookups = outputs_only(rank, new).permute(0, 2, 3, 1, 4)
        heads_total = total.transpose(1, 2)
        weights = weigh(lookups, keys.transpose(1, 2), heads_total, rank.first)
        errors, rate = (outputs_only(rank, gather(rank, packed)).transpose(1, 2) for packed in (self.values, self.beta))
        if state is not None:
            found = (lookups * heads_total[:, :, None, rank.first :].exp()) @ state.unsqueeze(2)
            errors = errors - found[:, :, 0]
        u = correct(group, rank, errors, rate, weights[:, :, 0], view)
        outputs = weights[:, :, 1] @ u
        if state is not None:
            outputs.add_(found[:, :, 1])
        return outputs.transpose(1, 2), {"k": keys, "u": u.transpose(1, 2), "decay": total}

    def advance(
        self, state: Float[Tensor, "rows heads key_dim value_dim"] | None, columns: Columns
    ) -> Float[Tensor, "rows heads key_dim value_dim"]:
        """Return the decayed earlier state plus the cell's tokens, each decayed since."""
        total = columns["decay"]
        keys = columns["k"] * torch.sub(total[:, -1:], total).exp_()
        added: Tensor = keys.permute(0, 2, 3, 1) @ columns["u"].transpose(1, 2)
        return added if state is None else added.addcmul_(state, total[:, -1].exp().unsqueeze(-1))


def weigh(
    both: Float[Tensor, "rows heads 2 outputs key_dim"],
    keys: Float[Tensor, "rows heads reach key_dim"],
    total: Float[Tensor, "rows heads reach key_dim"],
    first: int,
) -> Float[Tensor, "rows heads 2 outputs reach"]:
    """Return the weight of each of a cell's tokens for the key and the query of those from `first` on.

    Outputs go by blocks. Tokens before a block are decayed to its first token, and its lookups from there, so both
    exponentials are at most 1.
    """
    reach = keys.shape[2]
    weights = both.new_zeros(*both.shape[:4], reach)
    for low in range(first, reach, NEAR):
        high = min(low + NEAR, reach)
        own, lookups = total[:, :, low:high], both[:, :, :, low - first : high - first]
        start = own[:, :, :1]
        earlier = keys[:, :, :low] * (start - total[:, :, :low]).exp_()
        block = weights[:, :, :, low - first : high - first]
        block[..., :low] = (lookups * (own - start).exp_().unsqueeze(2)) @ earlier.transpose(2, 3).unsqueeze(2)
        # Above the diagonal the exponential may overflow; masked_fill_ overwrites, so no infinity is ever multiplied.
        later = torch.ones(high - low, high - low, dtype=torch.bool, device=keys.device).triu_(1)
        since = (own.unsqueeze(3) - own.unsqueeze(2)).exp_().masked_fill_(later[..., None], 0.0)
        near = since * keys[:, :, None, low:high]
        block[..., low:high] = torch.einsum("rhtic,rhijc->rhtij", lookups, near)
    return weights
