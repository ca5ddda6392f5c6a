"""The state space recurrence of Mamba2 (scalar decay per head).

For each head, with B and C shared by the heads of a group:

    S = exp(dt A) S + dt B x^T        y = C S + D x

Everything is computed and stored in float32, in models of any dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.outputs import placed
from weft.kernels.plain.walking import walk
from weft.kernels.recurrent import SsdInputs, SsdShape, conv_parts, ssd_state
from weft.memory.spec import Part, RecurrentMemory


def ssd_memory(shape: SsdShape, dtype: str) -> RecurrentMemory:
    """Return a layer's memory. A token leaves x, B and dt."""
    window, conv_input = conv_parts(shape.conv_channels, shape.conv_width, dtype)
    tail = (
        conv_input,
        Part("x", (shape.heads, shape.head_dim), "float32"),
        Part("B", (shape.groups, shape.state), "float32"),
        Part("dt", (shape.heads,), "float32"),
    )
    return RecurrentMemory((window, *ssd_state(shape)), tail, shape.conv_width)


def ssd(
    inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Float[Tensor, "tokens heads head_dim"] | None = None
) -> Float[Tensor, "tokens heads head_dim"]:
    x, B, C, dt = inputs.x.float(), inputs.B.float(), inputs.C.float(), inputs.dt.float()
    if inputs.dt_bias is not None:
        dt = F.softplus(dt + inputs.dt_bias).clamp(*inputs.limit)
    groups, heads = B.shape[1], x.shape[1]

    def advance(state: Tensor, token: dict[str, Tensor]) -> Float[Tensor, "groups state width"]:
        """Advance a state by one token. The state lies by group, so that reading it is one matmul of C with contiguous
        memory.
        """
        decay = (token["dt"] * inputs.A).exp().view(groups, -1).repeat_interleave(x.shape[2], 1)
        dtx = (token["dt"].unsqueeze(-1) * token["x"]).view(groups, -1)
        return state * decay.unsqueeze(1) + token["B"].unsqueeze(2) * dtx.unsqueeze(1)

    states = walk("ssm", {"x": x, "B": B, "dt": dt}, batch, view, advance)
    y = torch.stack([(C[token].unsqueeze(1) @ state).view(heads, -1) for token, state in enumerate(states)])
    if inputs.D is not None:
        y = y + inputs.D.unsqueeze(-1) * x
    y = y.to(inputs.x.dtype)
    if inputs.gate is not None:
        y = (F.silu(inputs.gate) * y.flatten(1)).view_as(y)
    return placed(y, out)
