"""The state space recurrence of the exact package: the usual kernels, none of them chosen by what is beside a row."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from weft.device.store import RecurrentView
from weft.kernels.cuda import ssd as usual
from weft.kernels.cuda.ssd import ssd_memory
from weft.kernels.interface import Batch
from weft.kernels.recurrent import SsdInputs

__all__ = ["ssd", "ssd_memory"]


def ssd(
    inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Float[Tensor, "tokens heads head_dim"] | None = None
) -> Float[Tensor, "tokens heads head_dim"]:
    return usual.ssd(inputs, batch, view, out, exact=True)
