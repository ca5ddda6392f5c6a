"""Pages of codes for tests of kernels that read and write them."""

from __future__ import annotations

import torch

from weft.device.store import AttentionView
from weft.kernels.pages import decoded, encoded

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def in_codes(view: AttentionView, kind: torch.dtype) -> AttentionView:
    """Return pages that hold the same keys and values, with other layers between them."""

    def apart(part: torch.Tensor) -> torch.Tensor:
        store = torch.full((len(part), 3, *part.shape[1:]), 0xFF, dtype=torch.uint8, device=part.device)
        store[:, 1] = part
        return store[:, 1]

    (keys, key_exponents), (values, value_exponents) = (encoded(part, kind) for part in (view.keys, view.values))
    codes = (apart(each.view(torch.uint8)).view(kind) for each in (keys, values))
    return AttentionView(*codes, view.window, apart(key_exponents), apart(value_exponents))


def held(view: AttentionView, dtype: torch.dtype) -> AttentionView:
    """Return pages with the numbers that pages of codes hold."""
    assert view.key_exponents is not None
    assert view.value_exponents is not None
    keys = decoded(view.keys, view.key_exponents, dtype)
    return AttentionView(keys, decoded(view.values, view.value_exponents, dtype), view.window)
