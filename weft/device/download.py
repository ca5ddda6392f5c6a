"""Asynchronous copy of results from the device to the host. The host waits only when it needs the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Download:
    """32-bit tensors (integers are narrowed) that are copied to the host together."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = [t if t.is_floating_point() else t.int() for t in tensors]
        self._landed: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            bits = [t.contiguous().view(torch.int32).flatten() for t in self._tensors]
            flat = bits[0] if len(bits) == 1 else torch.cat(bits)
            self._flat = torch.empty(len(flat), dtype=torch.int32, pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record()

    @property
    def landed(self) -> bool:
        return self._landed is None or bool(self._landed.query())

    def arrays(self) -> Iterator[NDArray[Any]]:
        """Wait for the copy and return the tensors as NumPy arrays, in order."""
        if self._landed is None:
            yield from (t.numpy() for t in self._tensors)
            return
        self._landed.synchronize()
        flat, first = self._flat.numpy(), 0
        for tensor in self._tensors:
            piece = flat[first : first + tensor.numel()].reshape(tensor.shape)
            first += tensor.numel()
            yield piece.view(np.float32) if tensor.is_floating_point() else piece
