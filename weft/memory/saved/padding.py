"""The bytes of a unit that no layer writes: they hold whatever another unit left there, and never leave the engine."""

from __future__ import annotations

from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec, RecurrentMemory, aligned

Gaps = tuple[tuple[int, int], ...]


def gaps_of(spec: MemorySpec) -> dict[Kind, Gaps]:
    """Return the intervals of bytes between and behind the layers of each kind of unit, in the order of the store.

    >>> from weft.memory.spec import AttentionMemory, Part
    >>> state = RecurrentMemory((Part("a", (3,), "float32"), Part("b", (16,), "float32")), (), 1)
    >>> gaps_of(MemorySpec((AttentionMemory(1, 8, "float32"), state)))[Kind.STATE]
    ((12, 64),)
    """
    sizes = unit_bytes(spec)
    ends = {Kind.PAGE: spec.page_bytes, Kind.WINDOW: spec.window_page_bytes, Kind.STATE: spec.state_bytes}
    found: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in ends if kind in sizes}
    here = 0
    for memory in spec.memories:
        for part in memory.state if isinstance(memory, RecurrentMemory) else ():
            found[Kind.STATE].append((here + part.bytes, here + aligned(part.bytes)))
            here += aligned(part.bytes)
    for kind, each in found.items():
        each.append((ends[kind], sizes[kind]))
    return {kind: tuple(gap for gap in each if gap[0] < gap[1]) for kind, each in found.items()}


def clear_gaps(unit: memoryview, gaps: Gaps) -> None:
    for start, end in gaps:
        unit[start:end] = bytes(end - start)
