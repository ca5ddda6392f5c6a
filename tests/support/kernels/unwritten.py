"""New memory that shows: whatever a kernel does not write, but reads or hands out, is NaN.

from tests.support.kernels.unwritten import unwritten_is_nan  # noqa: F401 (used by all tests of the module)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: object, **options: object) -> Tensor:
            tensor = allocate(*args, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

        return allocated

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, spoiling(getattr(owner, name)))
