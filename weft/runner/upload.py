"""Many small host arrays to the device in one copy. What they mean is the caller's business."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Kinds of arrays and what they become. The widest lie first, which keeps all aligned.
KINDS = {
    "i8": (np.int64, torch.int64),
    "i4": (np.int32, torch.int32),
    "f": (np.float32, torch.float32),
    "b": (np.bool_, torch.bool),
    "u": (np.uint8, torch.uint8),
}


def upload(arrays: Mapping[str, NDArray], device: torch.device | str, widen: bool = True) -> dict[str, Tensor]:
    """The arrays as tensors under the same names: views of one uploaded buffer.

    With `widen` all integers become int64, so that no layer on a CPU converts an index.

    >>> sent = upload({"ends": np.array([3, 5], np.int32), "real": np.array([[True, False]])}, "cpu")
    >>> sent["ends"].tolist(), sent["real"].tolist()
    ([3, 5], [[True, False]])
    """
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, array in arrays.items():
        by_kind[kind_of(array, widen)].append(name)
    regions = [
        np.concatenate([arrays[name].ravel() for name in names], dtype=KINDS[kind][0], casting="same_kind").view(
            np.uint8
        )
        for kind, names in by_kind.items()
        if names
    ]
    raw = to_device(np.concatenate(regions), torch.device(device))
    sent: dict[str, Tensor] = {}
    parts = iter(raw.split_with_sizes([len(region) for region in regions]))
    for kind, names in by_kind.items():
        if names:
            views = next(parts).view(KINDS[kind][1]).split_with_sizes([arrays[name].size for name in names])
            for name, view in zip(names, views):
                shape = arrays[name].shape
                sent[name] = view if len(shape) == 1 else view.view(shape)
    return sent


def to_device(packed: NDArray[np.uint8], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(packed)
    # From pinned memory the copy runs by itself; the allocator keeps the buffer until it is done.
    pinned = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = packed
    return pinned.to(device, non_blocking=True)


def kind_of(array: NDArray, widen: bool) -> str:
    kind = array.dtype.kind
    if kind != "i":
        return kind
    return "i8" if widen or array.dtype.itemsize > 4 else "i4"
