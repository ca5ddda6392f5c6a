"""Many small host arrays to the device in one copy. What they mean is the caller's business."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Integers are widened here, so that no layer converts an index. The widest lie first, which keeps all aligned.
KINDS = (("iu", np.int64, torch.int64), ("f", np.float32, torch.float32), ("b", np.bool_, torch.bool))


def upload(arrays: Mapping[str, NDArray], device: torch.device | str) -> dict[str, Tensor]:
    """The arrays as tensors (int64, float32 or bool) under the same names: views of one uploaded buffer.

    >>> sent = upload({"ends": np.array([3, 5], np.int32), "real": np.array([[True, False]])}, "cpu")
    >>> sent["ends"].tolist(), sent["real"].tolist()
    ([3, 5], [[True, False]])
    """
    regions = []
    for codes, wide, kind in KINDS:
        own = {name: array for name, array in arrays.items() if array.dtype.kind in codes}
        if own:
            joined = np.concatenate([array.ravel() for array in own.values()], dtype=wide, casting="same_kind")
            regions.append((own, joined.view(np.uint8), kind))
    raw = torch.from_numpy(np.concatenate([region for _, region, _ in regions])).to(device)
    sent: dict[str, Tensor] = {}
    first = 0
    for own, region, kind in regions:
        typed = raw[first : first + len(region)].view(kind)
        first += len(region)
        views = torch.split_with_sizes(typed, [array.size for array in own.values()])
        for (name, array), view in zip(own.items(), views):
            sent[name] = view if array.ndim == 1 else view.view(array.shape)
    return sent
