"""Keys of prefixes: a chained hash per cell, so that a key stands for all tokens up to the cell's end.

Salted per tenant at the root, so that tenants never share a key. Stable across processes and machines.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Key = bytes


def root_key(salt: bytes, cell: int) -> Key:
    return sha256(b"weft/1 %d " % cell + salt).digest()


def chain(parent: Key, tokens: NDArray[np.int32], cell: int) -> list[Key]:
    """Return the keys of the full cells of `tokens`, which begin right after the cell with key `parent`.

    >>> import numpy as np
    >>> tokens = np.arange(8, dtype=np.int32)
    >>> root = root_key(b"", 4)
    >>> first, second = chain(root, tokens, 4)
    >>> [second] == chain(first, tokens[4:], 4)
    True
    """
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * cell
    keys = []
    key = parent
    for first in range(0, len(raw) - step + 1, step):
        key = sha256(key + raw[first : first + step]).digest()
        keys.append(key)
    return keys
