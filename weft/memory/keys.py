"""Keys of prefixes: a chained hash per cell, so that a key stands for all tokens up to the cell's end.

A key is a function of the tokens and of a `PrefixIdentity`: all that a cell's state depends on, and nothing else. What
is the same for all cells of an engine, its model and its code, is the other half of a stored cell's name (`Identity`):
a file has it in its superblock, a store in the names of its objects, and two engines compare it before a transfer.
Stable across processes and machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Key = bytes
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """What the state of a cell depends on besides its tokens, in one engine. Tenants have different salts.

    A field that is empty does not change a key, so that new ones leave the keys of old contents as they are.
    """

    cell: int
    salt: bytes = b""
    form: str | None = None  # of an exact engine: all that the bits of its states depend on
    before: bytes = b""  # what was read before the first token: an MTP head's entries depend on one more
    adapter: bytes = b""  # the digest of an adapter's weights
    version: bytes = b""  # the digest of how the weights have changed since the model was loaded

    @property
    def root(self) -> Key:
        """The key of the empty prefix.

        >>> PrefixIdentity(4, b"a").root == PrefixIdentity(4, b"a", form="").root
        False
        """
        start = b"weft/1 %d " % self.cell + self.salt
        form = b"" if self.form is None else sha256(self.form.encode()).digest()
        parts = (form, self.before, self.adapter, self.version)
        if any(parts):
            # With lengths, so that no part can be taken for the beginning or the end of another.
            start = b"weft/2 " + b"".join(b"%d " % len(part) + part for part in (start, *parts))
        return sha256(start).digest()

    def keys(self, tokens: NDArray[np.int32], after: Key | None = None, decoded_from: int | None = None) -> list[Key]:
        """Return the keys of the full cells of `tokens`, which follow the cell with the key `after`, or begin a text.

        Tokens from index `decoded_from` on were generated, one at a time. In an exact engine, their cells differ in
        their last bits from those of a prompt with the same tokens, and their keys say so.

        >>> import numpy as np
        >>> identity, tokens = PrefixIdentity(4), np.arange(8, dtype=np.int32)
        >>> first, second = identity.keys(tokens)
        >>> [second] == identity.keys(tokens[4:], first)
        True
        """
        raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step = 4 * self.cell
        decoded_from = None if self.form is None else decoded_from
        keys = []
        key = self.root if after is None else after
        for first in range(0, len(raw) - step + 1, step):
            mark = b"" if decoded_from is None else _decoded(first // 4, self.cell, decoded_from)
            key = sha256(key + raw[first : first + step] + mark).digest()
            keys.append(key)
        return keys


def _decoded(start: int, cell: int, decoded_from: int) -> bytes:
    """Return where decoding began in the cell at `start`; nothing if it is all prompt."""
    return b"" if decoded_from >= start + cell else b"decoded %d" % max(0, decoded_from - start)
