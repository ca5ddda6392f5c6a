"""The four kinds of memory units. A unit of a kind lies at byte `index * unit_bytes` of the buffer."""

from __future__ import annotations

from enum import StrEnum

from weft.memory.spec import ALIGNMENT, MemorySpec, aligned


class Kind(StrEnum):
    PAGE = "page"
    WINDOW = "window"
    STATE = "state"
    TAIL = "tail"


def unit_bytes(spec: MemorySpec) -> dict[Kind, int]:
    """Return the bytes of one unit of each kind; kinds that the model does not need are absent.

    Tails no larger than a state are padded until a whole number of them is as large as one. A slab of a single state
    then has room for a tail wherever it lies, and every evicted state leaves a slab that any kind can use.
    """
    sizes = {
        Kind.PAGE: spec.page_bytes,
        Kind.WINDOW: spec.window_page_bytes,
        Kind.STATE: spec.state_bytes,
        Kind.TAIL: spec.tail_bytes,
    }
    found = {kind: aligned(size) for kind, size in sizes.items() if size}
    if Kind.TAIL in found and Kind.STATE in found:
        found[Kind.TAIL] = _padded(found[Kind.TAIL], found[Kind.STATE])
    return found


def _padded(size: int, whole: int) -> int:
    """Return the smallest aligned size that divides `whole` evenly; `size` itself if it is larger than `whole`.

    >>> _padded(192, 640), _padded(704, 640)
    (320, 704)
    """
    counts = range(whole // size, 0, -1)
    return next((whole // count for count in counts if whole % (count * ALIGNMENT) == 0), size)
