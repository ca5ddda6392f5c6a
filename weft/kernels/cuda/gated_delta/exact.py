"""The gated delta rule of the exact package: the usual kernels, computing a row in one way whatever is beside it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda import gated_delta as usual
from weft.kernels.cuda.gated_delta import gated_delta_memory
from weft.kernels.interface import Batch
from weft.kernels.recurrent import DeltaInputs

__all__ = ["gated_delta", "gated_delta_memory"]


def gated_delta(
    inputs: DeltaInputs, batch: Batch, view: RecurrentView
) -> Float[Tensor, "tokens value_heads value_dim"]:
    return usual.gated_delta(inputs, batch, view, exact=True)
