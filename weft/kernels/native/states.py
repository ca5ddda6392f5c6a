"""States of a layer as states.h reads them: at the end of a call's structure."""

from __future__ import annotations

import torch

from weft.device.store import RecurrentView
from weft.kernels.native.library import address
from weft.kernels.states import states_of

# Addresses of numbers and scales; their strides from state to state, and the kind of the numbers.
STATES = "2P3q"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def packed_states(view: RecurrentView, name: str) -> tuple[int, ...]:
    numbers, scales = states_of(view, name)
    strides = (numbers.stride(0), 0 if scales is None else scales.stride(0))
    return (numbers.data_ptr(), address(scales), *strides, KINDS[numbers.dtype])
