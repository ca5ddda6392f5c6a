"""The function between an expert's two matmuls, for kernels that hold both parts. Float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def between(gate, up, alpha, limit, NAME: tl.constexpr, PARTS: tl.constexpr):
    """Return activation(gate), times `up` if there are two parts; with one, `up` is ignored."""
    if NAME == "silu":
        gate = gate * sigmoid(gate)
    elif NAME == "sigmoid":
        gate = sigmoid(gate)
    elif NAME == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # tanh(z) = 2 * sigmoid(2 z) - 1, so (1 + tanh(z)) / 2 is sigmoid(2 z).
        gate = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif NAME == "clamped_swiglu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * sigmoid(alpha * gate)
        up = tl.minimum(
            tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, propagate_nan=tl.PropagateNan.ALL
        )
        up = up + 1.0
    else:
        tl.static_assert(NAME == "relu" or NAME == "relu2")
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if NAME == "relu2":
            gate = gate * gate
    if PARTS == 2:
        gate = gate * up
    return gate


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
