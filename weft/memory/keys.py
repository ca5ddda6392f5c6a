"""Keys of prefixes: a chained hash per cell, so that a key stands for all tokens up to the cell's end.

Salted per tenant at the root, so that tenants never share a key. Stable across processes and machines.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Key = bytes
KEY_BYTES = 32


def root_key(salt: bytes, cell: int, form: str | None = None) -> Key:
    """Return the key of the empty prefix. Exact engines have a `form`, all that the bits of a cell depend on."""
    start = b"weft/1 %d " % cell if form is None else b"weft/1 %d exact %s " % (cell, sha256(form.encode()).digest())
    return sha256(start + salt).digest()


def chain(parent: Key, tokens: NDArray[np.int32], cell: int, decoded_from: int | None = None) -> list[Key]:
    """Return the keys of the full cells of `tokens`, which begin right after the cell with key `parent`.

    Tokens from index `decoded_from` on were generated, one at a time: their cells differ in their last bits from those
    of a prompt with the same tokens, and their keys say so. None: it does not matter how they were computed.

    >>> import numpy as np
    >>> tokens = np.arange(8, dtype=np.int32)
    >>> root = root_key(b"", 4)
    >>> first, second = chain(root, tokens, 4)
    >>> [second] == chain(first, tokens[4:], 4)
    True
    >>> first == chain(root, tokens, 4, decoded_from=4)[0], second == chain(root, tokens, 4, decoded_from=4)[1]
    (True, False)
    >>> chain(root, tokens, 4, decoded_from=5)[1] == chain(root, tokens, 4, decoded_from=6)[1]
    False
    """
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * cell
    keys = []
    key = parent
    for first in range(0, len(raw) - step + 1, step):
        form = b"" if decoded_from is None else _form(first // 4, cell, decoded_from)
        key = sha256(key + raw[first : first + step] + form).digest()
        keys.append(key)
    return keys


def _form(start: int, cell: int, decoded_from: int) -> bytes:
    """Return where decoding began in the cell at `start`; nothing if it is all prompt."""
    return b"" if decoded_from >= start + cell else b"decoded %d" % max(0, decoded_from - start)
