"""The tensors behind the ledger: one flat buffer, and a view of it for every layer.

All layers of a page, state or tail lie side by side, so moving one is one copy. Unit `i` of a kind starts at byte
`i * unit_bytes[kind]`, whatever slab it is in; the arena decides which indices are in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import ALIGNMENT, CODES, ITEM_BYTES, AttentionMemory, MemorySpec, Part, RecurrentMemory, aligned

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8, "int8": torch.int8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionView:
    """Keys and values of one layer, by page: [pages, cell, kv_heads, head_dim].

    Values of a latent page are a view of its keys: their first features. Codes have exponents
    [pages, cell, kv_heads].
    """

    keys: torch.Tensor
    values: torch.Tensor
    window: int | None
    key_exponents: torch.Tensor | None = None
    value_exponents: torch.Tensor | None = None
    # Values that kernels derive from a view once, each under its own key.
    derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RecurrentView:
    """Checkpoints and tails of one layer, by part name.

    state[name]: [slots, *shape]    tail[name]: [tails, ring, *shape], position p at index p % ring

    Tails may be strided: each part chooses how its tokens lie in memory.
    """

    state: dict[str, torch.Tensor]
    tail: dict[str, torch.Tensor]
    # Values that kernels derive from a view once, each under its own key.
    derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


View = AttentionView | RecurrentView


class Store:
    """Owns the buffer. `views[i]` belongs to `spec.memories[i]`.

    This many `scratch` units of each kind lie behind the budget, unknown to the arena and never owned: for rows that
    only pad a step of fixed size, and for states inside a step. `scratch[kind]` is the index of the first.
    """

    def __init__(
        self, spec: MemorySpec, budget_bytes: int, device: torch.device | str = "cpu", scratch: int = 0
    ) -> None:
        self.spec = spec
        self.unit_bytes = unit_bytes(spec)
        # Units are aligned, so an odd remainder could not be used anyway.
        size = budget_bytes // ALIGNMENT * ALIGNMENT
        self.scratch: dict[Kind, int] = {}
        if scratch:
            for kind, unit in self.unit_bytes.items():
                self.scratch[kind] = -(-size // unit)
                size = (self.scratch[kind] + scratch) * unit
        self.buffer = _zeros(size, torch.device(device))
        self.views = self._carve()

    @property
    def is_host_memory(self) -> bool:
        """Return whether threads of the host can read and write the units in place."""
        return self.buffer.is_cpu

    @property
    def memory(self) -> memoryview | None:
        """The bytes of all units, if threads of the host can read and write them in place."""
        return self.buffer.numpy().data if self.is_host_memory else None

    def poison(self, kind: str, index: int) -> None:
        """Fill a freed unit with NaN (paranoid mode), so that reading it shows."""
        size = self.unit_bytes[Kind(kind)]
        # A run of 0xff bytes is a NaN in every floating type that we store.
        self.buffer[index * size : (index + 1) * size].fill_(0xFF)

    def unit(self, kind: Kind, index: int) -> torch.Tensor:
        """Return the bytes of one unit, which can travel to other tiers and machines."""
        size = self.unit_bytes[kind]
        return self.buffer[index * size : (index + 1) * size]

    def _strided(self, kind: Kind, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return all units of a kind as [units, *shape], each `offset_bytes` into its unit."""
        typed = self.buffer.view(DTYPES[dtype])
        item = typed.element_size()
        units = len(self.buffer) // self.unit_bytes[kind]
        inner = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return typed.as_strided((units, *shape), (self.unit_bytes[kind] // item, *inner), offset_bytes // item)

    def _carve(self) -> tuple[View, ...]:
        used = dict.fromkeys(Kind, 0)

        def take(kind: Kind, shape: tuple[int, ...], dtype: str, size: int) -> torch.Tensor:
            tensor = self._strided(kind, used[kind], shape, dtype)
            used[kind] += size
            return tensor

        def carve_attention(memory: AttentionMemory) -> AttentionView:
            kind = Kind.PAGE if memory.window is None else Kind.WINDOW
            shape = (self.spec.cell, memory.kv_heads, memory.head_dim)
            if memory.latent is not None:
                keys = take(kind, shape, memory.dtype, memory.bytes_per_token * self.spec.cell)
                return AttentionView(keys, keys[..., : memory.latent], memory.window)
            size = prod(shape) * ITEM_BYTES[memory.dtype]
            keys, values = (take(kind, shape, memory.dtype, size) for _ in range(2))
            if memory.dtype not in CODES:
                return AttentionView(keys, values, memory.window)
            of_keys, of_values = (take(kind, shape[:-1], "uint8", prod(shape[:-1])) for _ in range(2))
            return AttentionView(keys, values, memory.window, of_keys, of_values)

        def carve_recurrent(memory: RecurrentMemory) -> RecurrentView:
            def take_tail(part: Part) -> torch.Tensor:
                shape = (*part.shape[: part.apart], self.spec.ring(memory, part), *part.shape[part.apart :])
                tensor = take(Kind.TAIL, shape, part.dtype, self.spec.part_bytes(memory, part))
                return tensor.movedim(1 + part.apart, 1)

            state = {p.name: take(Kind.STATE, p.shape, p.dtype, aligned(p.bytes)) for p in memory.state}
            tail = {p.name: take_tail(p) for p in memory.tail}
            return RecurrentView(state, tail)

        return tuple(
            carve_attention(m) if isinstance(m, AttentionMemory) else carve_recurrent(m) for m in self.spec.memories
        )


def _zeros(size_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used; PyTorch would write them all.
    return torch.from_numpy(np.zeros(size_bytes, np.uint8))
