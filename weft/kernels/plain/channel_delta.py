"""The delta rule with a decay for each channel of a key (Kimi Delta Attention).

For each head, with keys and queries of unit length:

    S = exp(g)^T * S        u = beta (v - k S)        S = S + k^T u        y = q S

where g has an entry for each line of S, and queries are scaled by 1 / sqrt(key_dim). Everything is computed in float32,
in models of any dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.plain.gated_delta import unit
from weft.kernels.plain.walking import walk
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape, channel_delta_state, conv_parts
from weft.memory.spec import Part, RecurrentMemory


def channel_delta_memory(shape: ChannelDeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k, v, its log decays and its rate of correction."""
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.heads, shape.key_dim), "float32"),
        Part("v", (shape.heads, shape.value_dim), "float32"),
        Part("g", (shape.heads, shape.key_dim), "float32"),
        Part("beta", (shape.heads,), "float32"),
    )
    return RecurrentMemory((window, *channel_delta_state(shape)), tail, shape.conv_width)


def channel_delta(
    inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens heads value_dim"]:
    q, k, v = unit(inputs.q), unit(inputs.k), inputs.v.float()
    g, beta = decays_and_rates(inputs)

    def advance(state: Tensor, token: dict[str, Tensor]) -> Float[Tensor, "heads key_dim value_dim"]:
        key = token["k"].unsqueeze(1)
        state = state * token["g"].exp().unsqueeze(2)
        u = token["beta"][:, None, None] * (token["v"].unsqueeze(1) - key @ state)
        return state + key.transpose(1, 2) @ u

    states = walk("channel_delta", {"k": k, "v": v, "g": g, "beta": beta}, batch, view, advance)
    queries = (q * q.shape[2] ** -0.5).unsqueeze(2)
    return torch.stack([(queries[token] @ state).squeeze(1) for token, state in enumerate(states)]).to(inputs.v.dtype)


def decays_and_rates(
    inputs: ChannelDeltaInputs,
) -> tuple[Float[Tensor, "tokens heads key_dim"], Float[Tensor, "tokens heads"]]:
    """Return the log decays and the rates of correction, from projections or as given."""
    g, beta = inputs.step.float(), inputs.strength.float()
    if inputs.rates is None:
        return g, beta
    assert inputs.bias is not None
    return inputs.rates.unsqueeze(1) * F.softplus(g + inputs.bias), beta.sigmoid()
