"""The delta rule with decays by channel for rows of one token on a CPU: one call per layer."""

from __future__ import annotations

from struct import Struct

import torch
from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.interface import Batch
from weft.kernels.native.calls import call, room
from weft.kernels.native.library import DTYPES, address
from weft.kernels.native.limits import MOST_SIZE
from weft.kernels.native.states import STATES, packed_states
from weft.kernels.native.steps import step_address
from weft.kernels.recurrent import ChannelDeltaInputs

RULE = Struct(f"12P13q{STATES}")


def channel_delta(
    inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "rows heads value_dim"]:
    q, k, v, rates, bias = inputs.q, inputs.k, inputs.v, inputs.rates, inputs.bias
    decays, strengths = inputs.step, inputs.strength
    (rows, heads, value_dim), key_dim = v.shape, k.shape[2]
    keys, corrected, decay = view.tail["k"], view.tail["u"], view.tail["decay"]
    assert max(key_dim, value_dim) <= MOST_SIZE
    assert q.dtype == k.dtype == v.dtype
    assert keys.dtype == torch.float32
    assert keys.stride(1) == key_dim
    assert all(part is None or part.dtype == torch.float32 for part in (rates, bias))
    assert all(part.stride()[1:] == (part.shape[2], 1) for part in (q, k, v, decays))
    assert bias is None or bias.is_contiguous()
    y = room((rows, heads, value_dim), v.dtype)
    values = RULE.pack(
        step_address(batch),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), decays.data_ptr(), strengths.data_ptr(), address(rates),
        address(bias), y.data_ptr(), keys.data_ptr(), corrected.data_ptr(), decay.data_ptr(),
        q.stride(0), k.stride(0), v.stride(0), decays.stride(0), strengths.stride(0), keys.stride(0),
        heads, key_dim, value_dim, keys.shape[1],
        DTYPES[v.dtype], DTYPES[decays.dtype], DTYPES[strengths.dtype],
        *packed_states(view, "channel_delta"),
    )  # fmt: skip
    call("weft_channel_delta", values)
    return y
