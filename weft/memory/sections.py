"""Sections of units: which bytes of a page, window page or state are complete when a step has computed a layer.

All layers of a unit lie side by side, in the order of the model (`device/store.py`). So a unit can leave the device
piece by piece while later layers of the step that writes it are still being computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import AttentionMemory, Memory, MemorySpec, aligned

# Smaller layers travel together: each piece costs a copy, a message and a header.
LEAST_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Section:
    """The bytes [start, end) of each unit of a kind. `layer` is the last memory of the model that writes to them."""

    kind: Kind
    start: int
    end: int
    layer: int


def sections(spec: MemorySpec, least_bytes: int = LEAST_BYTES) -> tuple[Section, ...]:
    """Return the sections of all units that travel, in the order in which a step completes them.

    >>> memories = tuple(AttentionMemory(1, 8, "float32") for _ in range(3))
    >>> [(each.start, each.end, each.layer) for each in sections(MemorySpec(memories), least_bytes=6000)]
    [(0, 8192, 1), (8192, 12288, 2)]
    """
    sizes = unit_bytes(spec)
    found: list[Section] = []
    begun: dict[Kind, int] = {}
    ends: dict[Kind, int] = {}
    last = {_kind_of(memory): layer for layer, memory in enumerate(spec.memories)}
    for layer, memory in enumerate(spec.memories):
        kind = _kind_of(memory)
        start = begun.setdefault(kind, 0)
        ends[kind] = end = ends.get(kind, 0) + _bytes_of(memory, spec.cell)
        if layer == last[kind]:
            # With the padding behind the last layer.
            end = sizes[kind]
        elif end - start < least_bytes:
            continue
        found.append(Section(kind, start, end, layer))
        begun[kind] = end
    return tuple(found)


def _kind_of(memory: Memory) -> Kind:
    if isinstance(memory, AttentionMemory):
        return Kind.PAGE if memory.window is None else Kind.WINDOW
    return Kind.STATE


def _bytes_of(memory: Memory, cell: int) -> int:
    if isinstance(memory, AttentionMemory):
        return memory.bytes_per_token * cell
    return sum(aligned(part.bytes) for part in memory.state)
