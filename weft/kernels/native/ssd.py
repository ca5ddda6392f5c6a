"""The state space recurrence for rows of one token on a CPU: one call per layer."""

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
from weft.kernels.recurrent import SsdInputs

SCAN = Struct(f"12P12q2f{STATES}")


def scan(inputs: SsdInputs, batch: Batch, view: RecurrentView) -> Float[Tensor, "rows heads head_dim"]:
    """Compute all rows. A head's numbers, and a group's, must be contiguous; tails lie by head."""
    x, dt, A, B, C, D = inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D
    rows, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    left, keys, decay = view.tail["input"], view.tail["B"], view.tail["decay"]
    assert max(size, head_dim) <= MOST_SIZE
    assert x.dtype == B.dtype == C.dtype
    tail_stride, token_stride = left.stride()[:2]
    assert left.dtype == A.dtype == torch.float32
    assert all(part is None or part.dtype == torch.float32 for part in (D, inputs.dt_bias))
    assert token_stride == head_dim
    y = room((rows, heads, head_dim), x.dtype)
    values = SCAN.pack(
        step_address(batch),
        x.data_ptr(), dt.data_ptr(), B.data_ptr(), C.data_ptr(), A.data_ptr(), address(D), address(inputs.dt_bias),
        y.data_ptr(), left.data_ptr(), keys.data_ptr(), decay.data_ptr(),
        x.stride()[0], dt.stride()[0], B.stride()[0], C.stride()[0], tail_stride,
        heads, head_dim, groups, size, left.shape[1], DTYPES[x.dtype], DTYPES[dt.dtype], *inputs.limit,
        *packed_states(view, "ssm"),
    )  # fmt: skip
    call("weft_ssd", values)
    return y
