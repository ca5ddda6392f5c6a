"""How a router and a replica prove to each other that they know the same secret, before anything else is read.

The replica sends its version and a nonce; the router answers with the version that both will speak, its own nonce and a
MAC over all of that; the replica checks it and answers with a MAC of its own. A MAC also covers the protocol, the role
of its sender and the channel, so that none can be sent back or used on another channel. On TLS the channel is the
replica's certificate: the secret vouches for it, and a party in the middle, which has another certificate, is noticed.
The secret itself is never sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from weft.base.errors import OptionError, WeftError
from weft.base.guarded_files import others_can_read, read_guarded
from weft.wire.frames import ProtocolError
from weft.wire.messages import Message, Writer, reader
from weft.wire.versions import Protocol

NONCE_BYTES = MAC_BYTES = 32
# A handshake message, with room to spare; a larger one is refused before it has arrived.
MAX_BYTES = 256
LEAST_SECRET = 32
PLAIN = b"plain"

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
M = TypeVar("M", bound=Message)
Version = Annotated[int, Meta(ge=0, le=1 << 16)]


class HandshakeError(WeftError):
    """The peer does not know the secret, or does not speak the protocol."""


# No version may change these messages: they are read before the version is known.


class Hello(Message, tag="hello"):
    """The replica's first message, with the newest version that it speaks."""

    version: Version
    nonce: Nonce


class Proof(Message, tag="proof"):
    """The router's answer, with the version that both speak from now on."""

    version: Version
    nonce: Nonce
    mac: Mac


class Welcome(Message, tag="welcome"):
    """The replica's answer; frames of the protocol follow."""

    mac: Mac


_frame = Writer().frame
_read = reader(Hello | Proof | Welcome, "handshake")


class _Side:
    """One party. `channel` names the connection's certificate; `version` is the common one, once it is known."""

    def __init__(self, secret: bytes, protocol: Protocol, channel: bytes = PLAIN) -> None:
        self.protocol = protocol
        self.version = 0
        self._secret, self._channel = secret, channel
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def _mac(self, role: bytes, newest: int, replica_nonce: bytes, router_nonce: bytes) -> bytes:
        # Every part has a fixed length, so no two lists of parts read the same.
        spoken = b"weft %s %d of %d" % (self.protocol.name.encode(), self.version, newest)
        digests = b"".join(sha256(part).digest() for part in (spoken, role, self._channel))
        return hmac.digest(self._secret, digests + replica_nonce + router_nonce, "sha256")


class ReplicaSide(_Side):
    """A replica's half."""

    def hello(self) -> bytes:
        return _frame(Hello(self.protocol.version, self._nonce))

    def welcome(self, body: bytes) -> bytes:
        """Check a router's proof, and return the last message. Raises `HandshakeError` or `VersionError`."""
        proof = _expect(body, Proof)
        if not self.protocol.oldest <= proof.version <= self.protocol.version:
            self.protocol.refuse(proof.version)
        self.version, newest = proof.version, self.protocol.version
        _compare(proof.mac, self._mac(b"router", newest, self._nonce, proof.nonce))
        return _frame(Welcome(self._mac(b"replica", newest, self._nonce, proof.nonce)))


class RouterSide(_Side):
    """A router's half."""

    _hello: Hello

    def proof(self, body: bytes) -> bytes:
        """Return the answer to a replica's first message. Raises `HandshakeError` or `VersionError`."""
        hello = self._hello = _expect(body, Hello)
        self.version = self.protocol.common(hello.version)
        mac = self._mac(b"router", hello.version, hello.nonce, self._nonce)
        return _frame(Proof(self.version, self._nonce, mac))

    def check(self, body: bytes) -> None:
        """Check that the replica knows the secret. Raises `HandshakeError`."""
        hello = self._hello
        expected = self._mac(b"replica", hello.version, hello.nonce, self._nonce)
        _compare(_expect(body, Welcome).mac, expected)


def _compare(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise HandshakeError("the peer does not know the secret of this fleet, or is not at the end of this channel")


def _expect(body: bytes, kind: type[M]) -> M:
    try:
        message = _read(body)
    except ProtocolError as error:
        raise HandshakeError(str(error)) from None
    if not isinstance(message, kind):
        raise HandshakeError(f"not a handshake: expected a {kind.__name__}")
    return message


def read_secret(option: str, path: str) -> bytes:
    """Return the secret of a file that no other user can read or change."""
    text = read_guarded(option, path).strip()
    if others_can_read(os.stat(Path(path).expanduser())):
        raise OptionError(f"{option} {path} is refused: other users can read it; run chmod 600")
    if len(text) < LEAST_SECRET or not text.isprintable():
        raise OptionError(
            f"{option} {path} must hold one line of at least {LEAST_SECRET} characters, got {len(text)}; "
            "make one with: openssl rand -hex 32"
        )
    return text.encode()
