"""Versions of protocols. Two peers of one protocol speak the older one's version, or refuse each other in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from weft.wire.frames import ProtocolError


class VersionError(ProtocolError):
    """Two peers have no version of their protocol in common."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol, and the versions of it that this process speaks: `oldest` to `version`.

    `added` are the fields that each version has added, by the type that has them. A `strict` protocol has one version.
    """

    name: str
    version: int
    oldest: int
    strict: bool = False
    added: Mapping[int, Mapping[type, frozenset[str]]] = field(default_factory=dict)

    def common(self, theirs: int) -> int:
        """Return the version to speak with a peer whose newest one is this. Raises `VersionError` if there is none."""
        common = min(self.version, theirs)
        # A peer speaks its own version and the one before.
        if common < max(self.oldest, theirs - 1) or (self.strict and theirs != self.version):
            self.refuse(theirs)
        return common

    def refuse(self, theirs: int) -> NoReturn:
        raise VersionError(f"the peer speaks version {theirs} of the {self.name} protocol, not {self.version}")

    def newer(self, version: int) -> dict[type, frozenset[str]]:
        """Return the fields that a peer of this version does not know, by type."""
        found: dict[type, frozenset[str]] = {}
        for since, types in self.added.items():
            for kind, names in types.items() if since > version else ():
                found[kind] = found.get(kind, frozenset()) | names
        return found

    @property
    def greeting(self) -> bytes:
        """The first message between processes of one installation."""
        return f"weft {self.name} {self.version}".encode()

    def check_greeting(self, body: bytes) -> None:
        """Check what the other process has said first. Raises `VersionError`."""
        if body != self.greeting:
            theirs = body[:40].decode(errors="replace")
            raise VersionError(f"the other process speaks {theirs!r}, not {self.greeting.decode()!r}; start both again")


TRANSFER = Protocol("transfer", 4, oldest=4, strict=True)
RANKS = Protocol("ranks", 1, oldest=1, strict=True)
