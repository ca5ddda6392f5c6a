"""Where the ranks of a group find each other: a file in memory, without a name, which no crash leaves behind.

No torch: ranks are started before it is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from secrets import token_hex


@dataclass(frozen=True, slots=True)
class Meeting:
    """Inherited file through which the ranks of a group meet. Every key in it starts with the name of the group."""

    descriptor: int
    group: str

    @property
    def path(self) -> str:
        """Path of the file, in a process that has inherited it."""
        return f"/proc/self/fd/{self.descriptor}"


def new_meeting() -> Meeting:
    return Meeting(_file_in_memory(), token_hex(16))


@cache
def _file_in_memory() -> int:
    # One for all groups, and never closed: PyTorch's store opens it by its number once more when it is destroyed, and
    # another file could have the number by then.
    return os.memfd_create("weft-ranks")
