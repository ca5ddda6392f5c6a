"""Returns freed memory to the system, which the allocator keeps for itself when small blocks lie between large ones."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Return all free pages of this process. Takes milliseconds; does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
