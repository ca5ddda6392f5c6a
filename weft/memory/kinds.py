"""The four kinds of things that memory is made of. A unit of a kind lies at byte `index * unit_bytes` of the buffer."""

from __future__ import annotations

from enum import StrEnum

from weft.memory.spec import MemorySpec, aligned


class Kind(StrEnum):
    PAGE = "page"
    WINDOW = "window"
    STATE = "state"
    TAIL = "tail"


def unit_bytes(spec: MemorySpec) -> dict[Kind, int]:
    """Bytes of one unit of each kind; kinds that the model does not need are absent."""
    sizes = {
        Kind.PAGE: spec.page_bytes,
        Kind.WINDOW: spec.window_page_bytes,
        Kind.STATE: spec.state_bytes,
        Kind.TAIL: spec.tail_bytes,
    }
    return {kind: aligned(size) for kind, size in sizes.items() if size}
