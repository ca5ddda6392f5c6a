"""Many small host arrays to the device in one copy. What they mean is the caller's business."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Integers are widened here, so that no layer converts an index: 64 bits, the widest first to keep all aligned.
KINDS = (
    (np.dtype(np.int64), torch.int64, "iu"),
    (np.dtype(np.float32), torch.float32, "f"),
    (np.dtype(bool), torch.bool, "b"),
)


def upload(arrays: Mapping[str, NDArray], device: torch.device | str) -> dict[str, Tensor]:
    """The arrays as tensors (int64, float32 or bool) under the same names: views of one uploaded buffer.

    >>> sent = upload({"ends": np.array([3, 5], np.int32), "real": np.array([[True, False]])}, "cpu")
    >>> sent["ends"].tolist(), sent["real"].tolist()
    ([3, 5], [[True, False]])
    """
    regions = [(kind, [name for name, array in arrays.items() if array.dtype.kind in kind[2]]) for kind in KINDS]
    regions = [(kind, names) for kind, names in regions if names]
    flat = [_join([arrays[name] for name in names], kind[0]) for kind, names in regions]
    packed = flat[0] if len(flat) == 1 else np.concatenate([region.view(np.uint8) for region in flat])
    raw = torch.from_numpy(packed.view(np.uint8)).to(device)
    sent: dict[str, Tensor] = {}
    first = 0
    for (kind, names), region in zip(regions, flat):
        typed = raw[first : first + region.nbytes].view(kind[1])
        first += region.nbytes
        shapes = [arrays[name].shape for name in names]
        views = typed.split([prod(shape) for shape in shapes])
        sent |= {n: v if len(s) == 1 else v.view(s) for n, v, s in zip(names, views, shapes)}
    return sent


def _join(arrays: list[NDArray], dtype: np.dtype) -> NDArray:
    return np.concatenate([array.ravel() for array in arrays], dtype=dtype, casting="same_kind")
