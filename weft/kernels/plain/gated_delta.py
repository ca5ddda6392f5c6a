"""The gated delta rule.

For each value head, with keys and queries of unit length shared by the value heads of a key head:

    S = exp(g) S        u = beta (v - k S)        S = S + k^T u        y = q S

and queries are scaled by 1 / sqrt(key_dim). Everything is computed in float32, in models of any dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.plain.walking import walk
from weft.kernels.recurrent import DeltaInputs, DeltaShape, conv_parts, delta_state
from weft.memory.spec import Part, RecurrentMemory

NORM_EPSILON = 1e-6


def gated_delta_memory(shape: DeltaShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves k, v, its log decay and its rate of correction."""
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("k", (shape.key_heads, shape.key_dim), "float32"),
        Part("v", (shape.value_heads, shape.value_dim), "float32"),
        Part("g", (shape.value_heads,), "float32"),
        Part("beta", (shape.value_heads,), "float32"),
    )
    return RecurrentMemory((window, *delta_state(shape)), tail, shape.conv_width)


def gated_delta(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens value_heads value_dim"]:
    q, k, v = unit(inputs.q), unit(inputs.k), inputs.v.float()
    g, beta = inputs.step.float(), inputs.strength.float()
    if inputs.rates is not None:
        assert inputs.bias is not None
        g, beta = inputs.rates * F.softplus(g + inputs.bias), inputs.most * beta.sigmoid()
    share, key_dim = v.shape[1] // k.shape[1], k.shape[2]

    def advance(state: Tensor, token: dict[str, Tensor]) -> Float[Tensor, "value_heads key_dim value_dim"]:
        key = token["k"].repeat_interleave(share, 0).unsqueeze(1)
        state = state * token["g"].exp()[:, None, None]
        u = token["beta"][:, None, None] * (token["v"].unsqueeze(1) - key @ state)
        return state + key.transpose(1, 2) @ u

    states = walk("delta", {"k": k, "v": v, "g": g, "beta": beta}, batch, view, advance)
    queries = (q * key_dim**-0.5).repeat_interleave(share, 1).unsqueeze(2)
    return torch.stack([(queries[token] @ state).squeeze(1) for token, state in enumerate(states)]).to(inputs.v.dtype)


def unit(x: Float[Tensor, "tokens heads size"]) -> Float[Tensor, "tokens heads size"]:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
