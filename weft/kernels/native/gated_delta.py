"""The gated delta rule for rows of one token on a CPU: one call per layer."""

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
from weft.kernels.recurrent import DeltaInputs

RULE = Struct(f"12P14qd{STATES}")


def gated_delta(inputs: DeltaInputs, batch: Batch, view: RecurrentView) -> Float[Tensor, "rows value_heads value_dim"]:
    q, k, v, rates, bias = inputs.q, inputs.k, inputs.v, inputs.rates, inputs.bias
    decays, strengths = inputs.step, inputs.strength
    key_heads, key_dim = k.shape[1:]
    rows, value_heads, value_dim = v.shape
    keys, corrected, decay = view.tail["k"], view.tail["u"], view.tail["decay"]
    assert max(key_dim, value_dim) <= MOST_SIZE
    assert q.dtype == k.dtype == v.dtype
    tail_stride, token_stride = keys.stride()[:2]
    assert keys.dtype == torch.float32
    assert all(part is None or part.dtype == torch.float32 for part in (rates, bias))
    assert token_stride == key_dim
    y = room((rows, value_heads, value_dim), v.dtype)
    values = RULE.pack(
        step_address(batch),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), decays.data_ptr(), strengths.data_ptr(), address(rates),
        address(bias), y.data_ptr(), keys.data_ptr(), corrected.data_ptr(), decay.data_ptr(),
        q.stride()[0], k.stride()[0], v.stride()[0], decays.stride()[0], strengths.stride()[0],
        tail_stride,
        key_heads, key_dim, value_heads, value_dim, keys.shape[1],
        DTYPES[v.dtype], DTYPES[decays.dtype], DTYPES[strengths.dtype], inputs.most,
        *packed_states(view, "delta"),
    )  # fmt: skip
    call("weft_gated_delta", values)
    return y
