"""Values of a batch before their arrays are on the device, so that all of them can travel in one upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """A `kind` to be. Its fields are arrays, further drafts (or tuples of them), or values that stay as they are."""

    kind: type
    fields: dict[str, Any]

    def arrays(self, path: str = "") -> dict[str, NDArray]:
        """Every array below this draft, by its path."""
        found: dict[str, NDArray] = {}
        for name, value in self.fields.items():
            # Comparing types, as there are no subclasses here and this is done for every field of every step.
            kind = type(value)
            if kind is np.ndarray:
                found[path + name] = value
            elif kind is Draft:
                found |= value.arrays(f"{path}{name}.")
            elif kind is tuple and value and type(value[0]) is Draft:
                for index, item in enumerate(value):
                    found |= item.arrays(f"{path}{name}.{index}.")
        return found

    def finish(self, tensors: Mapping[str, Tensor], path: str = "") -> Any:
        """The value itself, with `tensors` in the places of the arrays."""
        done = self.fields.copy()
        for name, value in self.fields.items():
            kind = type(value)
            if kind is np.ndarray:
                done[name] = tensors[path + name]
            elif kind is Draft:
                done[name] = value.finish(tensors, f"{path}{name}.")
            elif kind is tuple and value and type(value[0]) is Draft:
                done[name] = tuple(item.finish(tensors, f"{path}{name}.{i}.") for i, item in enumerate(value))
        return self.kind(**done)
