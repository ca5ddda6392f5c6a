"""Whose states a stored unit holds: a model's, computed by this code, for exact answers or not.

In parts, so that a file of another one can say what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256

PART_BYTES = 16
MOST_REVISIONS = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model, and `revisions`: the family and the kernel packages with the numbers of what they compute.

    Units with another identity are never read, wherever they are stored.
    """

    configuration: bytes
    weights: bytes  # and their dtypes
    layout: bytes  # of memory, and which rank's part of it
    revisions: str
    exact: bool = False

    def __post_init__(self) -> None:
        assert all(len(part) == PART_BYTES for part in (self.configuration, self.weights, self.layout))
        assert len(self.revisions.encode()) <= MOST_REVISIONS, self.revisions

    @property
    def fingerprint(self) -> bytes:
        """One digest of all parts."""
        rest = f"{'exact' if self.exact else 'usual'}\n{self.revisions}".encode()
        return sha256(b"weft identity 2\n" + self.configuration + self.weights + self.layout + rest).digest()

    def is_outdated_by(self, other: Identity) -> bool:
        """Return whether another one differs in nothing but the numbers of what the code computes."""
        return self != other and replace(self, revisions=other.revisions) == other

    def difference(self, ours: Identity) -> str:
        """Return what is different in our own identity, for a message about a file with this one."""
        found = []
        if self.exact != ours.exact:
            here, there = ("on", "off") if ours.exact else ("off", "on")
            found.append(f"it was written with --exact {there}, which is {here} here")
        named = ("configuration", "weights or their dtype", "layout of memory")
        for name, theirs, own in zip(named, self._digests(), ours._digests(), strict=True):
            if theirs != own:
                found.append(f"the {name} differs" if name != named[1] else f"the {name} differ")
        if self.exact == ours.exact and self.revisions != ours.revisions:
            found.append(f"it was computed by {self.revisions}, and this is {ours.revisions}")
        return ", ".join(found)

    def _digests(self) -> tuple[bytes, bytes, bytes]:
        return self.configuration, self.weights, self.layout


def digest(data: bytes) -> bytes:
    """Return the digest of one part."""
    return sha256(data).digest()[:PART_BYTES]
