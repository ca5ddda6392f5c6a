"""The gaps of a unit are exactly the bytes that no layer's view reaches, so nothing else is cleared in files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.device.store import AttentionView, Store
from weft.memory.kinds import Kind
from weft.memory.saved.padding import clear_gaps, gaps_of
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

ODD = RecurrentMemory((Part("conv", (3, 5), "bfloat16"), Part("state", (2, 7, 3), "float32")), (), 4)
SPECS = {
    "odd states": MemorySpec((AttentionMemory(1, 6, "bfloat16"), ODD, ODD), cell=8),
    "windows": MemorySpec((AttentionMemory(3, 2, "float32", 16), AttentionMemory(1, 5, "float32"), ODD), cell=4),
    "latents": MemorySpec((AttentionMemory(1, 9, "bfloat16", latent=4),), cell=4),
}


def written(spec: MemorySpec, kind: Kind) -> np.ndarray:
    """Which bytes of a unit its layers write. Units of other kinds lie in the same buffer."""
    store = Store(spec, 1 << 16)
    for view in store.views:
        if isinstance(view, AttentionView):
            parts = [view.keys, view.values] if kind is (Kind.WINDOW if view.window else Kind.PAGE) else []
        else:
            parts = list(view.state.values()) if kind is Kind.STATE else []
        for part in parts:
            # All bits of each number.
            part.view(torch.int16 if part.element_size() == 2 else torch.int32)[1] = -1
    return store.unit(kind, 1).numpy() == 0xFF


@pytest.mark.parametrize("name", SPECS)
def test_gaps_are_what_no_layer_writes(name: str) -> None:
    for kind, gaps in gaps_of(SPECS[name]).items():
        expected = written(SPECS[name], kind)
        unit = bytearray(b"\xa5" * len(expected))
        clear_gaps(memoryview(unit), gaps)
        assert ((np.frombuffer(unit, np.uint8) == 0xA5) == expected).all(), kind
