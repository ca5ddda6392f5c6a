"""Tiers that hold nothing yet."""

from __future__ import annotations

from weft.base.errors import InvalidOption, OptionError
from weft.memory.arena import Arena
from weft.memory.cache import Cache
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec


def empty_tier(spec: MemorySpec, size_bytes: int, eviction: str, option: str = "host_memory") -> Cache:
    """Return an empty tier of this size. Tails are private to running sequences, so it has none."""
    sizes: dict[Kind, int] = {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}
    try:
        return Cache(spec, Arena(sizes, size_bytes), eviction)
    except OptionError as error:
        least = sum(sizes.values())
        raise InvalidOption(
            option, f"is {size_bytes} bytes, too small for a state and a page of this model ({least} bytes)"
        ) from error
