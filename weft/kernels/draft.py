"""Values of a batch before their arrays are on the device, so that all of them can travel in one upload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def arrays(self, path: str = "") -> Iterator[tuple[str, NDArray]]:
        """Every array below this draft, by its path."""
        for name, value in self.fields.items():
            if isinstance(value, np.ndarray):
                yield path + name, value
            elif isinstance(value, Draft):
                yield from value.arrays(f"{path}{name}.")
            elif isinstance(value, tuple) and value and isinstance(value[0], Draft):
                for index, item in enumerate(value):
                    yield from item.arrays(f"{path}{name}.{index}.")

    def finish(self, tensors: Mapping[str, Tensor], path: str = "") -> Any:
        """The value itself, with `tensors` in the places of the arrays."""
        done = {}
        for name, value in self.fields.items():
            if isinstance(value, np.ndarray):
                value = tensors[path + name]
            elif isinstance(value, Draft):
                value = value.finish(tensors, f"{path}{name}.")
            elif isinstance(value, tuple) and value and isinstance(value[0], Draft):
                value = tuple(item.finish(tensors, f"{path}{name}.{i}.") for i, item in enumerate(value))
            done[name] = value
        return self.kind(**done)
