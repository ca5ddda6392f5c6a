"""Upload of many small host arrays in one copy. The caller gives them meaning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Every array starts at a multiple of this number of bytes: kernels are compiled for it and load faster.
ALIGNMENT_BYTES = 16
# Kinds of arrays, their tensor dtypes, and the alignment in elements.
KINDS = {
    "i8": (np.int64, torch.int64, ALIGNMENT_BYTES // 8),
    "i4": (np.int32, torch.int32, ALIGNMENT_BYTES // 4),
    "f": (np.float32, torch.float32, ALIGNMENT_BYTES // 4),
    "b": (np.bool_, torch.bool, ALIGNMENT_BYTES),
    "u": (np.uint8, torch.uint8, ALIGNMENT_BYTES),
}
_FILLING = np.zeros(ALIGNMENT_BYTES, np.bool_)


def upload(arrays: Mapping[str, NDArray[Any]], device: torch.device | str, widen: bool = True) -> dict[str, Tensor]:
    """Return the arrays as tensors under the same names: views of one uploaded buffer.

    With `widen` all integers become int64, so that no layer on a CPU converts an index.

    >>> sent = upload({"ends": np.array([3, 5], np.int32), "real": np.array([[True, False]])}, "cpu")
    >>> sent["ends"].tolist(), sent["real"].tolist()
    ([3, 5], [[True, False]])
    """
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, array in arrays.items():
        by_kind[kind_of(array, widen)].append(name)
    regions = [_pack([arrays[name] for name in names], kind) for kind, names in by_kind.items()]
    raw = to_device(np.concatenate(regions) if len(regions) > 1 else regions[0], torch.device(device))
    sent: dict[str, Tensor] = {}
    for (kind, names), part in zip(by_kind.items(), raw.split_with_sizes([len(region) for region in regions])):
        _, dtype, step = KINDS[kind]
        sizes = [length for name in names for length in (arrays[name].size, -arrays[name].size % step)]
        for name, view in zip(names, part.view(dtype).split_with_sizes(sizes)[::2]):
            shape = arrays[name].shape
            sent[name] = view if len(shape) == 1 else view.view(shape)
    return sent


def _pack(arrays: list[NDArray[Any]], kind: str) -> NDArray[np.uint8]:
    """Return the bytes of arrays of one kind, each padded to the start of the next."""
    dtype, _, step = KINDS[kind]
    pieces = [piece for array in arrays for piece in (array.ravel(), _FILLING[: -array.size % step])]
    return np.concatenate(pieces, dtype=dtype, casting="same_kind").view(np.uint8)


def to_device(packed: NDArray[np.uint8], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(packed)
    # From pinned memory the copy is asynchronous; the allocator keeps the buffer until it is done.
    pinned = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = packed
    return pinned.to(device, non_blocking=True)


def kind_of(array: NDArray[Any], widen: bool) -> str:
    kind = array.dtype.kind
    if kind != "i":
        return kind
    return "i8" if widen or array.dtype.itemsize > 4 else "i4"
