"""Batch values whose arrays are not on the device yet, so that one upload can carry all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A `kind` whose arrays are on the host. Other fields are nested ones, tuples of them, or kept as they are."""

    kind: type
    fields: dict[str, Any]

    def arrays(self, path: str = "") -> dict[str, NDArray[Any]]:
        """Return every array below this value, by path."""
        found: dict[str, NDArray[Any]] = {}
        for name, value in self.fields.items():
            # `type()` instead of `isinstance`: there are no subclasses, and this runs for every field of every step.
            kind = type(value)
            if kind is np.ndarray:
                found[path + name] = value
            elif kind is StagedValue:
                found |= value.arrays(f"{path}{name}.")
            elif kind is tuple and value and type(value[0]) is StagedValue:
                for index, item in enumerate(value):
                    found |= item.arrays(f"{path}{name}.{index}.")
        return found

    def finish(self, tensors: Mapping[str, Tensor], path: str = "") -> Any:
        """Return the finished value, with `tensors` in place of the arrays."""
        done = self.fields.copy()
        for name, value in self.fields.items():
            kind = type(value)
            if kind is np.ndarray:
                done[name] = tensors[path + name]
            elif kind is StagedValue:
                done[name] = value.finish(tensors, f"{path}{name}.")
            elif kind is tuple and value and type(value[0]) is StagedValue:
                done[name] = tuple(item.finish(tensors, f"{path}{name}.{i}.") for i, item in enumerate(value))
        return self.kind(**done)
